#!/usr/bin/env bash
# A job on a SLURM cluster. bash launch/slurm.sh --help
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=contract.sh
source "$(dirname "${BASH_SOURCE[0]}")/contract.sh"

usage() {
  cat <<'HELP'
bash launch/slurm.sh {submit|cancel} [--dry_run]

With sbatch, by launch/settings.sh, in this folder, which all nodes see:

  submit   submits launch/slurm.sbatch; with SHARDS=n an array, one task per part of the sweep.
           Logs are runs/slurm/NAME-JOB.log
  cancel   takes what waits off the queue, and tells what runs to save and end, for good

  --dry_run  prints the commands and runs none

SLURM tells a job to save GRACE seconds before its time is up; it then queues again, as after a
death, an error (exit code 1) apart, at most RESTARTS times. For GPUs install jax[cuda13] into
.venv before (BUILD.md).
HELP
}

submit() {
  local log=%j array=() options=("--nodes=$SLURM_NODES" "--time=$SLURM_TIME") tasks=$SLURM_TASKS
  settings_job ''
  if ((SHARDS > 1)); then log=%A_%a array=("--array=1-$SHARDS"); fi
  if [[ -n $SLURM_PARTITION ]]; then options+=("--partition=$SLURM_PARTITION"); fi
  # One process per GPU: that is what jax makes of a task. All see all GPUs and take theirs.
  if ((SLURM_GPUS)); then options+=("--gpus-per-node=$SLURM_GPUS") tasks=$SLURM_GPUS; fi
  choose_python
  do_or_say mkdir -p "$ROOT/runs/slurm"
  do_or_say sbatch "--job-name=$NAME" "--chdir=$ROOT" "--output=runs/slurm/$NAME-$log.log" \
    "--signal=TERM@$GRACE" "${options[@]}" "--ntasks-per-node=$tasks" \
    ${array[@]+"${array[@]}"} ${SLURM_OPTIONS[@]+"${SLURM_OPTIONS[@]}"} \
    "$ROOT/launch/slurm.sbatch" "$RESTARTS" "$SHARDS" "${job[@]}"
}

cancel() {
  local id running='' mine=("--user=$(id -un)" "--name=$NAME")
  do_or_say scancel "${mine[@]}" --state=PENDING
  local list=(squeue "${mine[@]}" --states=RUNNING --noheader --format=%A)
  if [[ -n $dry_run ]]; then
    echo "# and for every ID of: $(quoted "${list[@]}")"
    running=ID
  else
    running=$("${list[@]}")
  fi
  for id in $running; do
    do_or_say scontrol update "JobId=$id" Requeue=0 # or it would queue again once it has saved
    do_or_say scancel --signal=TERM "$id"
  done
}

read_action 'submit cancel' "$@"
load_settings
needs_program sbatch 'This is not a machine that submits to SLURM.'
"$action"
