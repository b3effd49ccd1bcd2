#!/usr/bin/env bash
# A job on a cluster that xpk made. bash launch/xpk.sh --help
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=contract.sh
source "$(dirname "${BASH_SOURCE[0]}")/contract.sh"

usage() {
  cat <<'HELP'
bash launch/xpk.sh {plan|create|delete} [--dry_run]

With xpk (pip install xpk), by launch/settings.sh:

  plan     computes whether the training fits the TPUs, its hours and chip-hours; needs the compiler
           of `bash launch/test.sh --compile=v5e --collect-only`, and no TPU
  create   the workload NAME on CLUSTER; with SHARDS=n one per part of the sweep
  delete   the same workloads: they are told to save
  --dry_run  checks the config, prints the commands and runs none

WANDB_API_KEY and HF_TOKEN reach the hosts where they are set here.
xpk starts all hosts of a workload again after exit code 42, or 127 or more (its own rule), at most
RESTARTS times; a person must correct an error (exit code 1).
HELP
}

read_action 'plan create delete' "$@"
read_settings
if [[ $action == plan ]]; then plan_job "$SLICES"; exit; fi
need CLUSTER IMAGE
where=("--cluster=$CLUSTER" "--project=$PROJECT" "--zone=$ZONE")
case $PROVISIONING in
  on-demand) options=() ;;
  spot) options=(--spot) ;;
  reserved) need RESERVATION && options=("--reservation=$RESERVATION") ;;
  *) die "PROVISIONING=$PROVISIONING: on-demand, spot or reserved." ;;
esac
if [[ $action == create ]]; then remote=yes check_job "$(tpu_devices "$TPU_TYPE" "$SLICES")" "${job[@]}"; fi
if [[ $action == create ]]; then say 'Does it fit? bash launch/xpk.sh plan'; fi
environment_file=$(mktemp) # which only this user may read
trap 'rm -f "$environment_file"' EXIT
secrets %s >"$environment_file"
if [[ -s $environment_file ]]; then options+=("--env-file=$environment_file"); fi
((SHARDS == 1)) || [[ $JOB == sweep ]] || die "SHARDS=$SHARDS: only a sweep has parts."
for ((k = 1; k <= SHARDS; k++)); do
  name=$NAME part=()
  if ((SHARDS > 1)); then name=$NAME-$k part=("--shard=$k/$SHARDS"); fi
  if [[ $action == delete ]]; then
    do_or_say xpk workload delete "--workload=$name" "${where[@]}"
    continue
  fi
  # xpk hands signals to a shell: exec puts the job in its place.
  do_or_say xpk workload create "--workload=$name" "${where[@]}" "--tpu-type=$TPU_TYPE" \
    "--num-slices=$SLICES" "--docker-image=$IMAGE" "--max-restarts=$RESTARTS" \
    "--termination-grace-period-seconds=$GRACE" ${options[@]+"${options[@]}"} \
    "--command=exec $(quoted ${environment[@]+"${environment[@]}"} python -P -m sink_jax "${job[@]}" ${part[@]+"${part[@]}"})"
done
