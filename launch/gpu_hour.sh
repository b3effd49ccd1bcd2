#!/usr/bin/env bash
# Half an hour on one GPU, in three calls. bash launch/gpu_hour.sh --help
set -euo pipefail
root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

case ${1:-} in
  '' | -h | --help)
    cat <<'HELP'
bash launch/gpu_hour.sh check       # eight minutes
bash launch/gpu_hour.sh emergence   # nine minutes, then once more with --limit=420

check: compares every variant of the paper with its T x T definition on this GPU, then times
training steps, attention, the loss and importance, and with the time that is left block sizes
of the kernels. Meanwhile the text for emergence is tokenized: the sources of the installed
packages, so nothing is downloaded.

emergence: trains the 60M model as the paper does, with a fixed first token, with sigmoid
attention, with a key bias and with a window of 32 tokens (configs/emergence.py). The trainer
is a process of its own that goes on when the call ends; the next call finds it, or starts it
again where it stopped, should it have died. A call waits for it and ends by its limit.

stop: asks that trainer to save and end, and waits for it. emergence resumes it.

Each call leaves report.json and report.md in its --out. Those of emergence and stop also leave
a picture if there are curves, the end of the log, and runs.tar.gz with metrics.jsonl,
config.json, status.json and data.json of every run. Each is replaced as a whole: after each
trial and once a minute, or after a row of a check.

  --out=DIR          results/gpu_hour/COMMAND in the repository, unless given
  --work=DIR         what has to stay from call to call: text, checkpoints, compiled programs,
                     logs (runs/gpu_hour in the repository)
  --limit=SECONDS    for a call, at least 20 (check 480, emergence 540, stop 60)
  --wheels=DIR       packages this machine lacks, as BUILD.md lists them: installed without a
                     network into WORK, once, and nowhere else
  --smoke            tiny shapes, for a CPU: does everything run to the end?
  --parts=NAMES      of check: correctness, train_60m, saved_60m (the 60M step that keeps the
                     results of matrix products alone), attention, train_1b, loss, importance,
                     sweep
  --set=KEY=VALUE    of emergence, for all trials, such as --set=microbatches=4; repeatable.
                     What is about the data belongs to check as well
  PYTHON=python3     the Python to use, 3.11 or newer, with jax (CUDA), flax, optax, orbax
                     and matplotlib

Exit code of check: 1 if a correctness check failed, or if that part was wanted and made none; 2
if another part failed or the reports could not be written; else 0. Of emergence: 0 when all trials
are done, 42 when there is more to do, 1 when a trial failed. Of stop: 0 when no trainer is at work
any more, 42 when it still saves, 1 when its process is unknown. Of all: 2 for wrong options, a
folder that cannot be written, and without --smoke where jax sees no GPU; then nothing is started.
HELP
    exit
    ;;
esac
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -P "$root/launch/gpu_hour.py" "$@"
