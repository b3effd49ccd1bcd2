#!/usr/bin/env bash
# A job on a TPU VM, one host or a whole slice. bash launch/tpu_vm.sh --help
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=contract.sh
source "$(dirname "${BASH_SOURCE[0]}")/contract.sh"

usage() {
  cat <<'HELP'
bash launch/tpu_vm.sh {create|setup|run|logs|stop|delete} [--dry_run]

With gcloud, by launch/settings.sh:

  create   asks for the TPU VM by a queued resource, and waits until it is there
  setup    copies the committed state of this repository to all hosts and installs it there
  run      starts the job on all hosts and returns; it goes on when this machine is off, and
           starts again by itself when it has died or was stopped by others
  logs     what the first host writes, until Ctrl-C
  stop     tells all hosts to save and end, and waits for that
  delete   gives the TPU back

  --dry_run  prints the commands and runs none

After a spot TPU was taken away: delete, create, setup, run. The job resumes from WORKDIR.
HELP
}

read_action 'create setup run logs stop delete' "$@"
load_settings
need PROJECT ZONE TPU_NAME
needs_program gcloud 'https://cloud.google.com/sdk/docs/install'

where=("--project=$PROJECT" "--zone=$ZONE")
resource=(gcloud compute tpus queued-resources)

on_workers() { # WORKER COMMAND...
  local worker=$1
  shift
  do_or_say gcloud compute tpus tpu-vm ssh "$TPU_NAME" "${where[@]}" "--worker=$worker" \
    "--command=cd sink_jax && $(quoted "$@")"
}

state() {
  "${resource[@]}" describe "$TPU_NAME" "${where[@]}" '--format=value(state.state)' 2>/dev/null
}

create() {
  need TPU_TYPE TPU_RUNTIME
  local command=("${resource[@]}") kind=() now=''
  case $PROVISIONING in
    on-demand) ;;
    spot) kind=(--spot) ;;
    reserved)
      kind=(--reserved)
      if [[ -n $RESERVATION ]]; then # names of reservations are still alpha
        command=(gcloud alpha compute tpus queued-resources) kind+=("--reservation=$RESERVATION")
      fi
      ;;
    flex-start)
      command=(gcloud alpha compute tpus queued-resources)
      kind=(--provisioning-model=flex-start "--max-run-duration=$MAX_RUN")
      ;;
    *) die "PROVISIONING=$PROVISIONING: on-demand, spot, reserved or flex-start." ;;
  esac
  if [[ -z $dry_run ]]; then now=$(state) || now=''; fi
  if [[ -z $now ]]; then
    do_or_say "${command[@]}" create "$TPU_NAME" "--node-id=$TPU_NAME" "${where[@]}" \
      "--accelerator-type=$TPU_TYPE" "--runtime-version=$TPU_RUNTIME" ${kind[@]+"${kind[@]}"}
  fi
  if [[ -n $dry_run ]]; then
    quoted "${resource[@]}" describe "$TPU_NAME" "${where[@]}" '--format=value(state.state)'
    return
  fi
  wait_until_active
}

wait_until_active() {
  local now last='' unknown=0
  while :; do
    now=$(state) || now=''
    if [[ $now != "$last" && -n $now ]]; then say "$(date +%T) $TPU_NAME is $now"; fi
    case $now in
      ACTIVE) return ;;
      FAILED | SUSPENDING | SUSPENDED)
        die "$TPU_NAME is $now and will not come back." "What happened: $(
          quoted "${resource[@]}" describe "$TPU_NAME" "${where[@]}"
        )" 'Then: bash launch/tpu_vm.sh delete, and create again'
        ;;
      '') (((unknown += 1) < 5)) || die "gcloud does not tell the state of $TPU_NAME." ;;
    esac
    if [[ -n $now ]]; then unknown=0 last=$now; fi
    sleep "${POLL_SECONDS:-20}"
  done
}

setup() {
  local archive=${TMPDIR:-/tmp}/sink_jax-$NAME.tgz
  if [[ -n $(git -C "$ROOT" status --porcelain --untracked-files=no) ]]; then
    say 'Changes that are not committed stay here: only commits are copied.'
  fi
  do_or_say git -C "$ROOT" archive --format=tar.gz "--output=$archive" HEAD
  do_or_say gcloud compute tpus tpu-vm scp "$archive" "$TPU_NAME:sink_jax.tgz" "${where[@]}" \
    --worker=all
  do_or_say gcloud compute tpus tpu-vm ssh "$TPU_NAME" "${where[@]}" --worker=all \
    "--command=mkdir -p sink_jax && tar -xzf sink_jax.tgz -C sink_jax"
  on_workers all bash launch/tpu_host.sh setup "$TPU_PYTHON"
  do_or_say rm -f -- "$archive"
}

run() {
  needs_shared_paths ""
  [[ $SHARDS == 1 ]] || die "SHARDS=$SHARDS: a TPU VM runs a whole sweep; SHARDS=1."
  settings_job ''
  on_workers all bash launch/tpu_host.sh run "--restarts=$RESTARTS" -- "${job[@]}"
}

case $action in
  create | setup | run) "$action" ;;
  logs) on_workers 0 bash launch/tpu_host.sh logs ;;
  stop) on_workers all bash launch/tpu_host.sh stop "$GRACE" ;;
  delete) do_or_say "${resource[@]}" delete "$TPU_NAME" "${where[@]}" --force ;;
esac
