#!/usr/bin/env bash
# A job on a TPU VM, one host or a whole slice. bash launch/tpu_vm.sh --help
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=contract.sh
source "$(dirname "${BASH_SOURCE[0]}")/contract.sh"

usage() {
  cat <<'HELP'
bash launch/tpu_vm.sh {plan|create|setup|run|logs|stop|delete} [--dry_run]

With gcloud, by launch/settings.sh:

  plan     computes whether the training fits the TPUs, its hours and chip-hours; needs the compiler
           of `bash launch/test.sh --compile=v5e --collect-only`, and no TPU
  create   asks for the TPU VM by a queued resource, and waits until it is there
  setup    copies the committed state of this repository to all hosts and installs it there, with a
           Python 3.12 that uv installs
  run      starts the job on all hosts and returns; it continues when this machine is off
  logs     the errors of all hosts, then the output of the first one, until Ctrl-C
  stop     tells all hosts to save and end, and waits for that
  delete   gives the TPU back: until then it costs, also when the job is done
  --dry_run  checks the config, prints the commands and runs none

Each host restarts its own process after exit code 42 or a death. After an error on one host the
others start in vain, five minutes each, until `stop`. xpk restarts all of them together. After a spot
TPU was taken away: delete, create, setup, run. WANDB_API_KEY and HF_TOKEN reach the hosts where they are
set here. SETTINGS=FILE names other settings, so that two slices can be at work.
HELP
}

read_action 'plan create setup run logs stop delete' "$@"
read_settings
need TPU_NAME
where=("--project=$PROJECT" "--zone=$ZONE")
resource=(gcloud compute tpus queued-resources)

on_hosts() { # WORKER COMMAND
  do_or_say gcloud compute tpus tpu-vm ssh "$TPU_NAME" "${where[@]}" "--worker=$1" "--command=$2"
}

create() {
  local options=() state last=''
  need TPU_RUNTIME
  case $PROVISIONING in
    on-demand) ;;
    spot | reserved) options=("--$PROVISIONING") ;;
    *) die "PROVISIONING=$PROVISIONING: on-demand, spot or reserved." ;;
  esac
  if [[ -n $RESERVATION ]]; then
    resource=(gcloud alpha compute tpus queued-resources) options+=("--reservation=$RESERVATION")
  fi
  do_or_say "${resource[@]}" create "$TPU_NAME" "--node-id=$TPU_NAME" "${where[@]}" \
    "--accelerator-type=$TPU_TYPE" "--runtime-version=$TPU_RUNTIME" ${options[@]+"${options[@]}"}
  while [[ -z $dry_run && $last != ACTIVE ]]; do
    state=$("${resource[@]}" describe "$TPU_NAME" "${where[@]}" '--format=value(state.state)')
    if [[ $state != "$last" ]]; then say "$(date +%T) $TPU_NAME is $state"; fi
    case $state in FAILED | SUSPEND*) die "$TPU_NAME is $state: delete, and create again." ;; esac
    last=$state
    sleep "${POLL_SECONDS:-20}"
  done
}

setup() {
  local archive=${TMPDIR:-/tmp}/sink_jax-$NAME.tgz
  do_or_say git -C "$ROOT" archive --format=tar.gz "--output=$archive" HEAD
  do_or_say gcloud compute tpus tpu-vm scp "$archive" "$TPU_NAME:sink_jax.tgz" "${where[@]}" --worker=all
  # shellcheck disable=SC2016 # expanded on the hosts
  on_hosts all 'mkdir -p sink_jax && tar -xzf sink_jax.tgz -C sink_jax && cd sink_jax &&
    python3 -m pip install --user --quiet uv && export PATH="$HOME/.local/bin:$PATH" &&
    source launch/environment.sh && prepare_environment &&
    pip_install --constraint requirements.txt --constraint launch/bucket.txt "jax[tpu]" "etils[epath-gcs]" &&
    { echo always | sudo -n tee /sys/kernel/mm/transparent_hugepage/enabled >/dev/null || true; }'
}

# Copies the secrets into a file of the user on each host, readable by nobody else.
send_secrets() {
  secrets_file=$(mktemp) # which only this user may read
  trap 'rm -f "$secrets_file"' EXIT
  secrets %q >"$secrets_file"
  if [[ ! -s $secrets_file ]]; then
    on_hosts all 'rm -f sink_jax.secrets' # of an earlier job
    return
  fi
  on_hosts all 'umask 077 && touch sink_jax.secrets && chmod 600 sink_jax.secrets'
  do_or_say gcloud compute tpus tpu-vm scp "$secrets_file" "$TPU_NAME:sink_jax.secrets" "${where[@]}" \
    --worker=all
}

run() {
  remote=yes check_job "$(tpu_devices "$TPU_TYPE" 1)" "${job[@]}"
  say 'Does it fit? bash launch/tpu_vm.sh plan'
  send_secrets
  on_hosts all "cd sink_jax || exit 1; \
if kill -0 \$(cat run.pid) 2>/dev/null; then echo 'a job runs here'; exit 1; fi; \
if [ -e ../sink_jax.secrets ]; then set -a; . ../sink_jax.secrets; set +a; fi; \
nohup $(quoted ${environment[@]+"${environment[@]}"} bash launch/local.sh "--restarts=$RESTARTS" "${job[@]}") >>run.log 2>&1 </dev/null & \
echo \$! >run.pid"
  say "It runs on the hosts. When it is done, $TPU_NAME costs until: bash launch/tpu_vm.sh delete"
}

case $action in
  plan) plan_job 1 ;;
  create | setup | run) "$action" ;;
  logs)
    on_hosts all 'hostname && grep -E "^(process [0-9]+: |error: )" sink_jax/run.log | tail -n 5'
    on_hosts 0 'tail -n 100 -F sink_jax/run.log'
    ;;
  stop) on_hosts all "cd sink_jax && kill -TERM \$(cat run.pid) &&
    timeout $GRACE tail --pid=\$(cat run.pid) -f /dev/null; tail -n 3 run.log" ;;
  delete) do_or_say "${resource[@]}" delete "$TPU_NAME" "${where[@]}" --force ;;
esac
