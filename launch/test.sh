#!/usr/bin/env bash
# The tests, in a virtual environment. bash launch/test.sh --help
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
TARGETS=v5e,v5p,v6e,v7x,h200
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  cat <<'HELP'
bash launch/test.sh [--full] [--parity] [--compile[=TARGETS]] [arguments of pytest]

Runs the tests on the CPU.
  --full             also the tests that take long or go through every combination
  --compile          instead of the tests, compiles kernels and training steps for TPUs (v5e, v5p, v6e, v7x)
                     and an NVIDIA GPU (h200), without them; --compile=v5e,h200: for these. Their compilers
                     are installed once (1.3 GB) into COMPILERS=DIR, unset: compilers in the environment
  --parity           instead of the tests, compares importers and exports of open models with transformers on
                     new random weights; installs it and PyTorch once (1.3 GB and more) into PARITY=DIR, unset:
                     parity in the environment
  WORKERS=3          processes that run the tests; 0: all in one, as a debugger needs
  BUCKET=DIR         folder of the emulator of gs:// (69 MB), unset: gs in the environment
  JAX_PLATFORMS=cpu  set it to run the tests on another device
  PYTHON= VENV=      the Python and the environment (BUILD.md)
HELP
  exit
fi

# install PINS DIRECTORY: installs the requirements launch/PINS.txt where the environment does not see them.
install() {
  local pins=$ROOT/launch/$1.txt directory=$2
  if cmp -s "$pins" "$directory/installed.txt"; then return; fi
  if [[ -e $directory && ! -e $directory/installed.txt ]]; then
    die "$directory is there, and this script did not finish it. Remove it, or name another by COMPILERS, PARITY or BUCKET."
  fi
  say "Installing launch/$1.txt into $directory: once, up to a few minutes."
  rm -rf -- "$directory"
  "$RUN_PYTHON" -m pip install --quiet --no-compile "${@:3}" --target "$directory" --requirement "$pins" ||
    return
  compile_bytecode "$directory"
  cp "$pins" "$directory/installed.txt"
}

targets='' parity='' arguments=()
for argument in "$@"; do
  case $argument in
    --compile) targets=$TARGETS arguments+=(tests/compile) ;;
    --compile=*) targets=${argument#*=} arguments+=(tests/compile) ;;
    --parity) parity=yes arguments+=(tests/pretrained/test_parity.py) ;;
    *) arguments+=("$argument") ;;
  esac
done
for target in ${targets//,/ }; do
  [[ ,$TARGETS, == *",$target,"* ]] || die "--compile=$target: no such target; choices: $TARGETS."
done
prepare_environment
prefix=$("$RUN_PYTHON" -c 'import sys; print(sys.prefix)')
export COMPILE_TARGETS=$targets COMPILERS=${COMPILERS:-$prefix/compilers} PARITY_PACKAGES=''
if [[ $targets == *v* ]]; then install compilers/tpu "$COMPILERS/tpu" --no-deps; fi
if [[ $targets == *h* ]]; then install compilers/cuda "$COMPILERS/cuda" --no-deps; fi
if [[ -n $parity ]]; then PARITY_PACKAGES=${PARITY:-$prefix/parity} && install parity "$PARITY_PACKAGES"; fi
if [[ -z $targets$parity && ($VENV != none || -n ${BUCKET:-}) ]]; then
  export BUCKET=${BUCKET:-$prefix/gs}
  (install bucket "$BUCKET" --no-deps --retries=1 --timeout=15) || say "The tests of gs:// are skipped."
fi
# Three for two cores, as each waits for processes of its own in a part of its time. Tests of a file
# share what is traced.
workers=(-n "${WORKERS:-3}" --dist=loadfile --no-loadscope-reorder)
if [[ ${WORKERS:-3} == 0 ]]; then workers=(); fi # then pytest-xdist is not needed either
cd "$ROOT"
exec "$RUN_PYTHON" -P -m pytest -q --durations=10 ${workers[@]+"${workers[@]}"} ${arguments[@]+"${arguments[@]}"}
