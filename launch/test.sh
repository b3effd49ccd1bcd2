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
  --full             also the tests that take long or go through every combination, and, where Python
                     3.13 is found, notebooks with the packages of Colab: installed once (1.4 GB) into
                     COLAB=DIR, unset: colab in the environment
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

# install PINS DIRECTORY: installs the requirements launch/PINS.txt where the environment does not see them,
# by and for the Python RUN_PYTHON.
install() {
  local pins=$ROOT/launch/$1.txt directory=$2
  if cmp -s "$pins" "$directory/installed.txt"; then return; fi
  if [[ -e $directory && ! -e $directory/installed.txt ]]; then
    die "$directory is there, and this script did not finish it. Remove it, or name another by COMPILERS, PARITY, BUCKET or COLAB."
  fi
  say "Installing launch/$1.txt into $directory: once, up to a few minutes."
  rm -rf -- "$directory"
  "$RUN_PYTHON" -m pip install --quiet --no-compile "${@:3}" --target "$directory" --requirement "$pins" ||
    return
  compile_bytecode "$directory"
  cp "$pins" "$directory/installed.txt"
}

# python_313: prints a Python 3.13 of this machine; fails without one.
python_313() {
  local candidate is_313='import sys, venv; sys.exit(sys.version_info[:2] != (3, 13))'
  for candidate in "$RUN_PYTHON" "$(command -v python3.13)" "$(uv python find 3.13 2>/dev/null)" \
    "$(pyenv root 2>/dev/null)"/versions/3.13.*/bin/python; do
    if "$candidate" -c "$is_313" 2>/dev/null; then echo "$candidate" && return; fi
  done
  return 1
}

targets='' parity='' full='' arguments=()
for argument in "$@"; do
  case $argument in
    --compile) targets=$TARGETS arguments+=(tests/compile) ;;
    --compile=*) targets=${argument#*=} arguments+=(tests/compile) ;;
    --full) full=yes arguments+=(--full) ;;
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
if [[ -n $full && -z $targets$parity && ($VENV != none || -n ${COLAB:-}) ]]; then
  export COLAB=${COLAB:-$prefix/colab} COLAB_PYTHON=''
  if ! COLAB_PYTHON=$(python_313); then
    say 'The tests of Colab are skipped: there is no Python 3.13.'
  elif ! (RUN_PYTHON=$COLAB_PYTHON install colab "$COLAB" --no-deps); then
    say 'The tests of Colab are skipped.' && COLAB_PYTHON=''
  fi
fi
# Three for two cores, as each waits for processes of its own in a part of its time. Tests of a file
# share what is traced.
workers=(-n "${WORKERS:-3}" --dist=loadfile --no-loadscope-reorder)
if [[ ${WORKERS:-3} == 0 ]]; then workers=(); fi # then pytest-xdist is not needed either
cd "$ROOT"
exec "$RUN_PYTHON" -P -m pytest -q --durations=10 ${workers[@]+"${workers[@]}"} ${arguments[@]+"${arguments[@]}"}
