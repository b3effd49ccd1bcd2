#!/usr/bin/env bash
# Correctness and speed on one NVIDIA GPU, in one call. bash launch/gpu_check.sh --help
set -euo pipefail
root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

case ${1:-} in
  -h | --help)
    cat <<'HELP'
bash launch/gpu_check.sh [OUT_DIR] [--smoke] [--limit=480] [--parts=correctness,attention]

Checks every variant of the paper on this machine's GPU against the T x T definition, then
times attention, importance, the loss and training steps, and with the time that is left
block sizes of the kernels. Takes at most eight minutes, says what it does and how long it
will be, and writes OUT_DIR/gpu_check.json with every number and OUT_DIR/gpu_check.md to
read; OUT_DIR is results/gpu_check in the repository, unless given. Parts that fail, or that
are stopped when their time is up, leave what they have found.

  --smoke            tiny shapes, about a minute on a CPU: does everything run to the end?
  --limit=SECONDS    for everything (480)
  --parts=NAMES      correctness, attention, importance, loss, train_60m, train_1b, sweep
  --seed=N           of all random inputs (0)
  PYTHON=python3     the Python to use, 3.11 or newer with jax (CUDA), flax, optax and numpy;
                     PyTorch is compared with where it is installed. Nothing is installed

Exit code: 0 if every correctness check passed, 1 if one failed or none was made, 2 if
another part failed.
HELP
    exit
    ;;
esac

out=$root/results/gpu_check
if [[ $PWD -ef $root ]]; then out=results/gpu_check; fi
if (($#)) && [[ $1 != -* ]]; then
  out=$1
  shift
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -P -m sink_jax.benchmark check "$out" "$@"
