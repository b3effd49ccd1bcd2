#!/usr/bin/env bash
# Harm to training runs, and what comes of it, as a table. bash launch/faults.sh --help
set -euo pipefail
root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

case ${1:-} in
  -h | --help)
    cat <<'HELP'
bash launch/faults.sh [OUT_DIR] [--rounds=200] [--only=NAMES] [--seed=0] [--smoke]

Kills, stops, starves and damages real training runs of a tiny model on the CPU, in every way
that machines do, and checks what is promised of each: no wrong parameters, no more lost steps
than stated, the right exit code. Writes OUT_DIR/faults.json and OUT_DIR/README.md, a row as
soon as it is done; OUT_DIR is results/faults in the repository, unless given. The same
command resumes it: rows that passed with its settings are kept. With
200 rounds it takes two to five hours on two cores, and says how long it will be.

  --rounds=N           kills of one process; other rows make a part or a multiple of it (200)
  --only=NAMES         some rows: kill, sigterm, kill-pair, sigterm-pair, damage, damage-json,
                       damage-record, power-cut, damage-command, other-model, disk-full,
                       read-only, rival, rival-unseen, processes, mesh, jax, absent
  --seed=N             of all random moments and places (0)
  --smoke              four rounds of short runs: does everything run to the end?
  --other_python=PATH  a Python with another version of jax, for the row jax
  PYTHON=python3       the Python to use, 3.11 or newer with the packages of requirements.txt

The row disk-full mounts small file systems of its own, which takes root; without, it is
skipped, and the table says why. The workdir of a failed round is kept, and named.

Exit code: 0 if no row failed, 1 if one did.
HELP
    exit
    ;;
esac

out=$root/results/faults
if [[ $PWD -ef $root ]]; then out=results/faults; fi
if (($#)) && [[ $1 != -* ]]; then
  out=$1
  shift
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -P -m tests.faults "$out" "$@"
