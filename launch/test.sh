#!/usr/bin/env bash
# The tests, in an environment of their own. bash launch/test.sh --help
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

TARGETS=v5e,v5p,v6e,v7x,h200

case ${1:-} in
  -h | --help)
    cat <<'HELP'
bash launch/test.sh [--full] [--parity] [--slurm] [--compile[=TARGETS]] [arguments of pytest]

Runs the tests on the CPU. Paths among the arguments start at the repository.

  --full             also the tests that go through every combination
  --compile          instead of the tests, compiles kernels and training steps for devices
                     that are not here: TPUs (v5e, v5p, v6e, v7x) and an NVIDIA GPU (h200).
                     Their compilers are installed beside the environment (1.3 GB), once
  --compile=v5e,h200 the same for these only
  --parity           instead of the tests, compares the importers of open models, and exported
                     runs, with transformers, on new random weights. It and PyTorch are installed beside
                     the environment (1.3 GB; with PyTorch's CUDA packages, which pip takes
                     on some platforms, several), once
  --slurm            instead of the tests, starts a SLURM of one node here, runs a job there that
                     is stopped, queues again and resumes, and ends it. As root, after
                     apt-get install slurmd slurmctld slurm-client munge
  PARITY=DIR         where they lie; unset: parity in the environment
  COMPILERS=DIR      where the compilers lie; unset: compilers in the environment
  BUCKET=DIR         where tests put what emulates gs:// (70 MB); unset: bucket in the environment
  COMPILE_TABLE=FILE gets a line of JSON about every compile: memory, registers, spills
  WORKERS=2          processes to run them in; 0: all in one, as a debugger needs
  JAX_PLATFORMS=cpu  set it to run the tests on another device

HELP
    environment_help
    exit
    ;;
esac

# Sets targets, from --compile, parity, slurm, and arguments: the others.
read_arguments() {
  local argument
  targets='' parity='' slurm='' arguments=()
  for argument in "$@"; do
    case $argument in
      --parity) parity=yes ;;
      --slurm) slurm=yes ;;
      --compile) targets=$TARGETS ;;
      --compile=*) targets=${argument#*=} && check_targets ;;
      *) arguments+=("$argument") ;;
    esac
  done
}

check_targets() {
  local target
  for target in ${targets//,/ }; do
    case ,$TARGETS, in
      *",$target,"*) ;;
      *) die "--compile=$target: no such target; choices: ${TARGETS//,/, }." ;;
    esac
  done
  [[ -n ${targets//,/} ]] || die "--compile= needs a target; choices: ${TARGETS//,/, }."
}

# install_beside PINS DIRECTORY [OPTIONS]: installs the requirements launch/PINS.txt where the
# environment does not see them by itself. As with the environment, a stamp that is written
# last says that all of it is there.
install_beside() {
  local name=launch/$1.txt directory=$2 version complete written=''
  local pins=$ROOT/$name stamp=$directory/sink_jax.stamp
  shift 2
  version=$(describe_python "$RUN_PYTHON")
  version=${version%% *}
  complete="Python ${version%.*}"$'\n'$(<"$pins")
  if [[ -f $stamp && $(<"$stamp") == "$complete" ]]; then return; fi
  if command -v flock >/dev/null; then
    exec 9<"$pins"
    if ! flock -n 9; then
      say 'Another installation is under way: waiting for it.'
      flock 9 || true
    fi
  fi
  if [[ -f $stamp ]]; then written=$(<"$stamp"); fi
  if [[ $written != "$complete" ]]; then
    if [[ -z $written && -e $directory && -n $(ls -A "$directory") ]]; then
      die "$directory is there, and this script did not make it." \
        'Remove it, or choose another place with COMPILERS=DIR or PARITY=DIR.'
    fi
    say "Installing $name into $directory: once, up to a few minutes."
    rm -rf -- "$directory"
    mkdir -p "$directory"
    echo unfinished >"$stamp"
    pip_install "$RUN_PYTHON" "$@" --target "$directory" --requirement "$pins"
    printf '%s\n' "$complete" >"$stamp"
  fi
  if command -v flock >/dev/null; then exec 9<&-; fi
}

prepare_compilers() {
  if [[ -z ${COMPILERS:-} ]]; then
    [[ $VENV != none ]] || die 'VENV=none: set COMPILERS=DIR to say where compilers may go.'
    COMPILERS=$VENV/compilers
  fi
  case $COMPILERS in /*) ;; *) COMPILERS=$PWD/$COMPILERS ;; esac
  export COMPILERS JAX_PLATFORMS=cpu
  case $targets in *v*) install_beside compilers/tpu "$COMPILERS/tpu" --no-deps ;; esac
  case $targets in *h*) install_beside compilers/cuda "$COMPILERS/cuda" --no-deps ;; esac
}

prepare_parity() {
  if [[ -z ${PARITY:-} ]]; then
    [[ $VENV != none ]] || die 'VENV=none: set PARITY=DIR to say where PyTorch may go.'
    PARITY=$VENV/parity
  fi
  case $PARITY in /*) ;; *) PARITY=$PWD/$PARITY ;; esac
  install_beside parity "$PARITY"
}

read_arguments "$@"
prepare_environment
export PARITY_PACKAGES=''
export COMPILE_TARGETS=$targets
paths=()
if [[ -n $targets ]]; then
  prepare_compilers
  case " ${arguments[*]-}" in *" tests/"*) ;; *) paths=(tests/compile) ;; esac
fi
if [[ -n $parity ]]; then
  prepare_parity
  PARITY_PACKAGES=$PARITY
  case " ${arguments[*]-}" in *" tests/"*) ;; *) paths+=(tests/pretrained/test_parity.py) ;; esac
fi
export SLURM_TEST=$slurm
if [[ -n $slurm ]]; then paths+=(tests/launchers/test_slurm.py); fi
cd "$ROOT"
workers=(-n "${WORKERS:-2}")
if [[ ${WORKERS:-2} == 0 ]]; then workers=(); fi # then pytest-xdist is not needed either
exec "$RUN_PYTHON" -P -m pytest -q --durations=10 ${workers[@]+"${workers[@]}"} \
  ${paths[@]+"${paths[@]}"} ${arguments[@]+"${arguments[@]}"}
