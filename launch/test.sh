#!/usr/bin/env bash
# The tests, in an environment of their own. bash launch/test.sh --help
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

TARGETS=v5e,v5p,v6e,v7x,h200

case ${1:-} in
  -h | --help)
    cat <<'HELP'
bash launch/test.sh [--full] [--compile[=TARGETS]] [arguments of pytest]

Runs the tests on the CPU. Paths among the arguments start at the repository.

  --full             also the tests that go through every combination
  --compile          instead of the tests, compiles kernels and training steps for devices
                     that are not here: TPUs (v5e, v5p, v6e, v7x) and an NVIDIA GPU (h200).
                     Their compilers are installed beside the environment (1.3 GB), once
  --compile=v5e,h200 the same for these only
  COMPILERS=DIR      where the compilers lie; unset: compilers in the environment
  COMPILE_TABLE=FILE gets a line of JSON about every compile: memory, registers, spills
  WORKERS=2          processes to run them in; 0: all in one, as a debugger needs
  JAX_PLATFORMS=cpu  set it to run the tests on another device

HELP
    environment_help
    exit
    ;;
esac

# Sets targets, from --compile, and arguments: the others.
read_arguments() {
  local argument
  targets='' arguments=()
  for argument in "$@"; do
    case $argument in
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

# Installs launch/compilers/$1.txt into $COMPILERS/$1, where jax does not see it by itself.
# As with the environment, a stamp that is written last says that all of it is there.
install_compiler() {
  local pins=$ROOT/launch/compilers/$1.txt directory=$COMPILERS/$1 version complete written=''
  local stamp=$directory/sink_jax.stamp
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
        'Remove it, or choose another place with COMPILERS=DIR.'
    fi
    say "Installing launch/compilers/$1.txt into $directory: once, up to a minute."
    rm -rf -- "$directory"
    mkdir -p "$directory"
    echo unfinished >"$stamp"
    pip_install "$RUN_PYTHON" --no-deps --target "$directory" --requirement "$pins"
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
  case $targets in *v*) install_compiler tpu ;; esac
  case $targets in *h*) install_compiler cuda ;; esac
}

read_arguments "$@"
prepare_environment
export COMPILE_TARGETS=$targets
paths=()
if [[ -n $targets ]]; then
  prepare_compilers
  case " ${arguments[*]-}" in *" tests/"*) ;; *) paths=(tests/compile) ;; esac
fi
cd "$ROOT"
workers=(-n "${WORKERS:-2}")
if [[ ${WORKERS:-2} == 0 ]]; then workers=(); fi # then pytest-xdist is not needed either
exec "$RUN_PYTHON" -P -m pytest -q --durations=10 ${workers[@]+"${workers[@]}"} \
  ${paths[@]+"${paths[@]}"} ${arguments[@]+"${arguments[@]}"}
