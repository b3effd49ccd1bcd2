#!/usr/bin/env bash
# Times the README's two commands and a card as a newcomer meets them: from an empty clone, with an empty home.
#
#   bash tests/benchmark/cold.sh DIR [PART ...]
#
# DIR is made, and holds the clone and the home. A PART is install, quickstart, test or card; by default all.
# Nothing outside DIR is read or written, so no cache has to be moved away.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
mkdir -p "$1" && cd "$1"
parts=("${@:2}")
if [[ ${#parts[@]} == 0 ]]; then parts=(install quickstart test card); fi
PYTHON=${PYTHON:-$(python3 -c 'import sys; print(sys.executable)')} # a shim may look for its files in HOME
config=${PIP_CONFIG_FILE:-${XDG_CONFIG_HOME:-$HOME/.config}/pip/pip.conf}
if [[ -f $config ]]; then export PIP_CONFIG_FILE=$config; fi
export PYTHON HOME=$PWD/home
unset XDG_CACHE_HOME SINK_JAX_CACHE SINK_JAX_COMPILE_CACHE JAX_COMPILATION_CACHE_DIR VENV
mkdir -p "$HOME"
[[ -d clone ]] || git clone --quiet "$root" clone
cd clone

seconds() { echo "$1: $(($3 - $2)) s"; }
for part in "${parts[@]}"; do
  began=$(date +%s)
  case $part in
    install) bash -c 'source launch/environment.sh && prepare_environment && fetch_model smollm2' ;;
    quickstart)
      bash launch/quickstart.sh
      model=$(stat -c %Y quickstart/sink_report.json) trained=$(stat -c %Y quickstart/runs/summary.md)
      seconds '  a published model' "$began" "$model"
      seconds '  trainings' "$model" "$trained"
      seconds '  page' "$trained" "$(date +%s)"
      ;;
    test) bash launch/test.sh ;;
    card) .venv/bin/python -P -m sink_jax card --checkpoint=SmolLM2-135M-Instruct --out=card ;;
    *) echo "error: unknown part $part" >&2 && exit 1 ;;
  esac
  seconds "$part" "$began" "$(date +%s)"
done
.venv/bin/python -P -m sink_jax benchmark loss --seconds 2 | head -1 # how fast the machine is
