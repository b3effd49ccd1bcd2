#!/usr/bin/env bash
# A job on a cluster that xpk made. bash launch/xpk.sh --help
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=contract.sh
source "$(dirname "${BASH_SOURCE[0]}")/contract.sh"

usage() {
  cat <<'HELP'
bash launch/xpk.sh {create|delete} [--dry_run]

With xpk (pip install xpk), by launch/settings.sh:

  create   the workload NAME on CLUSTER; with SHARDS=n one per part of the sweep
  delete   the same workloads: they are told to save

  --dry_run  prints the commands and runs none

xpk starts a workload again after exit code 42, or one from 127 on, at most RESTARTS times; it
lets an error (exit code 1) be. Clusters: xpk cluster create --help
HELP
}

read_action 'create delete' "$@"
load_settings
need PROJECT ZONE CLUSTER
needs_program xpk 'With Python 3.12 in an environment of its own: pip install xpk'
where=("--cluster=$CLUSTER" "--project=$PROJECT" "--zone=$ZONE")

create() { # NAME K
  local options=()
  case $PROVISIONING in
    on-demand) ;;
    spot) options=(--spot) ;;
    flex-start) options=(--flex) ;;
    reserved)
      need RESERVATION
      options=("--reservation=$RESERVATION")
      ;;
    *) die "PROVISIONING=$PROVISIONING: on-demand, spot, reserved or flex-start." ;;
  esac
  settings_job "$2"
  # xpk hands signals to a shell: exec puts the job in its place.
  do_or_say xpk workload create "--workload=$1" "${where[@]}" "--tpu-type=$TPU_TYPE" \
    "--num-slices=$SLICES" "--docker-image=$IMAGE" "--max-restarts=$RESTARTS" \
    "--termination-grace-period-seconds=$GRACE" ${options[@]+"${options[@]}"} \
    "--command=exec bash /sink_jax/launch/local.sh -- $(quoted "${job[@]}")"
}

if [[ $action == create ]]; then
  need TPU_TYPE IMAGE
  needs_shared_paths bucket
fi
for ((k = 1; k <= SHARDS; k++)); do
  name=$NAME
  if ((SHARDS > 1)); then name=$NAME-$k; fi
  case $action in
    create) create "$name" "$k" ;;
    delete) do_or_say xpk workload delete "--workload=$name" "${where[@]}" ;;
  esac
done
