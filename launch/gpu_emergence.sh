#!/usr/bin/env bash
# Where sinks emerge in the 60M model, on one GPU. bash launch/gpu_emergence.sh --help
set -euo pipefail
root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

case ${1:-} in
  -h | --help)
    cat <<'HELP'
bash launch/gpu_emergence.sh [WORKDIR] [--limit=540] [--out=DIR] [options of the sweep]

Trains the 60M model five times on this machine's GPU: as the paper does, with sigmoid
attention, with a key bias, with a window of 32 tokens and with a fixed first token;
configs/emergence.py says how. The text is the sources of the installed packages, so nothing
is downloaded. A call ends within its limit, saved; the same command goes on where it
stopped, and every call writes the report of what there is. WORKDIR is runs/emergence.

  --limit=SECONDS    for a call (540), the report included; at least 90
  --out=DIR          of the report (results/gpu_emergence in the repository)
  --set=KEY=VALUE    and other options of python -m sink_jax.sweep, such as
                     --set=microbatches=4 for a GPU of less than 48 GB
  PYTHON=python3     the Python to use, with jax (CUDA) and what BUILD.md lists for a
                     GPU machine. Nothing is installed

Exit code: 0 when all five are done, 42 when there is more to do: run it again.
HELP
    exit
    ;;
esac

workdir=runs/emergence limit=540 out=$root/results/gpu_emergence options=()
if [[ $PWD -ef $root ]]; then out=results/gpu_emergence; fi
if (($#)) && [[ $1 != -* ]]; then
  workdir=$1
  shift
fi
for argument in "$@"; do
  case $argument in
    --limit=*) limit=${argument#*=} ;;
    --out=*) out=${argument#*=} ;;
    *) options+=("$argument") ;;
  esac
done
if ! [[ $limit =~ ^[0-9]+$ ]] || ((limit < 90)); then
  echo "error: --limit=$limit: a whole number of seconds, at least 90." >&2
  exit 2
fi

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
config=$root/configs/emergence.py
if [[ $PWD -ef $root ]]; then config=configs/emergence.py; fi
status=0
# Asked to stop a minute early: a step, a checkpoint and the report take some of it.
timeout --preserve-status --signal=TERM --kill-after=30 "$((limit - 60))" \
  "$python" -P -m sink_jax.sweep --config="$config" --workdir="$workdir" \
  ${options[@]+"${options[@]}"} || status=$?
case $status in
  0 | 1 | 42) ;;                      # done, a trial failed, stopped and saved
  143) status=42 ;;                   # stopped while it was still starting
  *) exit "$status" ;;
esac
if compgen -G "$workdir/*/metrics.jsonl" >/dev/null; then
  "$python" -P -m sink_jax.report --kind=runs --runs="$workdir" --out="$out" --nomaps
fi
if ((status == 42)); then echo 'There is more to do: run the same command again.' >&2; fi
exit "$status"
