#!/usr/bin/env bash
# A job on machines that SkyPilot rents. bash launch/sky.sh --help
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=contract.sh
source "$(dirname "${BASH_SOURCE[0]}")/contract.sh"

usage() {
  cat <<'HELP'
bash launch/sky.sh {render|launch|logs|cancel} [--dry_run]

With SkyPilot (pip install "skypilot[gcp]", or another cloud), by launch/settings.sh:

  render   prints the task; with SHARDS=n one per part of the sweep
  launch   submits it as a managed job: spot machines that are taken away are replaced
  logs     what the job writes, until Ctrl-C
  cancel   ends it at once; what came after the last checkpoint is lost

  --dry_run  prints the commands and runs none

Changes that are not committed come along: SkyPilot copies the folder.
HELP
}

render() { # NAME K
  find_yaml_python
  settings_job "$2"
  "$yaml_python" "$ROOT/launch/render.py" sky "--name=$1" "--hardware=$HARDWARE" \
    "--accelerator=$SKY_ACCELERATORS" "--hosts=$SKY_NODES" "--cloud=$SKY_CLOUD" \
    "--provisioning=$PROVISIONING" "--restarts=$RESTARTS" -- "${job[@]}"
}

launch() { # NAME K
  local file=runs/sky/$1.yaml
  if [[ -n $dry_run ]]; then
    render "$@" | sed "s/^/# $1.yaml: /"
  else
    mkdir -p runs/sky
    render "$@" >"$file"
  fi
  do_or_say sky jobs launch --yes --detach-run "--name=$1" "$file"
}

read_action 'render launch logs cancel' "$@"
load_settings
case $PROVISIONING in on-demand | spot) ;; *)
  die "PROVISIONING=$PROVISIONING: with SkyPilot on-demand or spot." ;;
esac
case $action in render | launch) needs_shared_paths bucket ;; esac
if [[ $action != render ]]; then needs_program sky 'pip install "skypilot[gcp]"'; fi
cd "$ROOT" # which the task names as its workdir
for ((k = 1; k <= SHARDS; k++)); do
  name=$NAME
  if ((SHARDS > 1)); then name=$NAME-$k; fi
  case $action in
    render | launch) "$action" "$name" "$k" ;;
    logs) do_or_say sky jobs logs "--name=$name" ;;
    cancel) do_or_say sky jobs cancel --yes "--name=$name" ;;
  esac
done
