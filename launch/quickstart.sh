#!/usr/bin/env bash
# From a fresh clone to the first figures. bash launch/quickstart.sh --help
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case ${1:-} in
  -h | --help)
    cat <<'HELP'
bash launch/quickstart.sh [DIR]

Trains small models for about five minutes on two CPU cores and writes the comparison to
DIR/index.html, with the runs in DIR/runs. DIR is quickstart/ where it is called, unless
given. Interrupted, the same command resumes it; once done, it only makes
the page again.

HELP
    environment_help
    exit
    ;;
  -*) die "unknown option $1; see bash launch/quickstart.sh --help" ;;
esac

(($# < 2)) || die "unexpected argument $2; see bash launch/quickstart.sh --help"
out=${1:-quickstart}
prepare_environment
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
config=$ROOT/configs/quickstart.py
if [[ $PWD -ef $ROOT ]]; then config=configs/quickstart.py; fi
status=0
"$RUN_PYTHON" -P -m sink_jax.sweep --config="$config" --workdir="$out/runs" || status=$?
if ((status > 1)); then exit "$status"; fi # stopped; a failed trial is part of the report
"$RUN_PYTHON" -P -m sink_jax.report --runs="$out/runs" --out="$out"
exit "$status"
