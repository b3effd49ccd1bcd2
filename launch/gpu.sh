#!/usr/bin/env bash
# Kernels, benchmarks and small models on one NVIDIA GPU. bash launch/gpu.sh --help
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'HELP'
bash launch/gpu.sh [--dry_run] [DIR]

Compares every variant of the paper with its T x T definition on this GPU, times attention, the loss,
importance and training steps (DIR/NAME.json), trains the five 60M models of configs/emergence.py
(DIR/runs, minutes each, on the sources of the installed packages) and compares them (DIR/report).
Run again, it skips the tests that passed and the benchmarks that were written, and resumes the
training. DIR is results/gpu in the repository, unless given. --dry_run prints the commands.

Exit code: 0 all was done; 42 the training was stopped and saved; any other: tests or a command failed.

HELP
  environment_help
}

out=$ROOT/results/gpu dry_run=''
for argument in "$@"; do
  case $argument in
    -h | --help) usage && exit ;;
    --dry_run) dry_run=yes ;;
    -*) die "unknown option $argument; see bash launch/gpu.sh --help" ;;
    /*) out=$argument ;;
    *) out=$PWD/$argument ;;
  esac
done

status=0
# Runs a command, or prints it; a failure is kept for the end. Returns whether it succeeded.
step() {
  local code=0
  if [[ -n $dry_run ]]; then printf '%q ' "$@" && echo && return; fi
  "$@" || { code=$? && status=$code; }
  return "$code"
}

cd "$ROOT"
if [[ -z $dry_run ]]; then
  prepare_environment
  mkdir -p "$out"
elif [[ $VENV == none ]]; then
  RUN_PYTHON=${PYTHON:-python3}
else
  RUN_PYTHON=$VENV/bin/python # that of the real run
fi
export JAX_PLATFORMS=cuda,cpu
step "$RUN_PYTHON" -P -c 'import jax; print(jax.devices("cuda"))' || die "jax sees no NVIDIA GPU." \
  "CUDA for jax: $RUN_PYTHON -m pip install -c requirements.txt 'jax[cuda13]'"
if [[ ! -e $out/kernels.passed ]]; then
  step "$RUN_PYTHON" -P -m pytest -q tests/kernels/test_device.py && step touch "$out/kernels.passed" || true
fi
for name in attention loss importance train_step; do
  [[ -e $out/$name.json ]] || step "$RUN_PYTHON" -P -m sink_jax benchmark "$name" --json="$out/$name.json" || true
done
step "$RUN_PYTHON" -P -m sink_jax sweep --config=configs/emergence.py --workdir="$out/runs" || true
step "$RUN_PYTHON" -P -m sink_jax report --runs="$out/runs" --out="$out/report" || true
exit "$status"
