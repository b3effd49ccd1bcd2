#!/usr/bin/env bash
# A job on GKE, as a JobSet. bash launch/gke.sh --help
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=contract.sh
source "$(dirname "${BASH_SOURCE[0]}")/contract.sh"

usage() {
  cat <<'HELP'
bash launch/gke.sh {render|apply|delete|logs} [--dry_run]

With kubectl, for the cluster it is set to, by launch/settings.sh. The cluster needs JobSet
(https://jobset.sigs.k8s.io), and Kueue if QUEUE is set.

  render   prints the manifest: a JobSet, or with SHARDS=n one per part of the sweep
  apply    hands it to the cluster. A run that is done or failed: delete it before
  logs     what all pods of the job write, until Ctrl-C
  delete   tells the pods to save, gives them GRACE seconds, and removes the job

  --dry_run  prints the command and runs none

A JobSet starts again, at most RESTARTS times, after exit code 42, a death, or the loss of a
machine; an error (exit code 1) ends it. Parts of a sweep do so each for itself.
HELP
}

render() {
  local k name
  find_yaml_python
  for ((k = 1; k <= SHARDS; k++)); do
    name=$NAME
    if ((SHARDS > 1)); then name=$NAME-$k; fi
    settings_job "$k"
    "$yaml_python" "$ROOT/launch/render.py" jobset "--name=$name" "--label=$NAME" \
      "--image=$IMAGE" "--hardware=$HARDWARE" "--accelerator=$ACCELERATOR" \
      "--topology=$TOPOLOGY" "--slices=$SLICES" "--hosts=$HOSTS" "--chips=$CHIPS" \
      "--provisioning=$PROVISIONING" "--reservation=$RESERVATION" "--queue=$QUEUE" \
      "--service_account=$SERVICE_ACCOUNT" "--restarts=$RESTARTS" "--grace=$GRACE" \
      -- "${job[@]}"
  done
}

read_action 'render apply delete logs' "$@"
load_settings
need NAMESPACE
kubectl=(kubectl "--namespace=$NAMESPACE")
case $action in
  render | apply)
    need IMAGE
    needs_shared_paths bucket
    ;;
esac
if [[ $action != render ]]; then
  needs_program kubectl 'https://kubernetes.io/docs/tasks/tools'
fi
case $action in
  render) render ;;
  apply)
    manifest=$(render)
    if [[ -n $dry_run ]]; then
      echo "bash launch/gke.sh render | $(quoted "${kubectl[@]}" apply -f -)"
    else
      printf '%s\n' "$manifest" | "${kubectl[@]}" apply -f -
    fi
    ;;
  delete)
    do_or_say "${kubectl[@]}" delete jobsets.jobset.x-k8s.io \
      "--selector=app.kubernetes.io/instance=$NAME"
    ;;
  logs)
    do_or_say "${kubectl[@]}" logs --follow --prefix --tail=100 \
      "--max-log-requests=$((SHARDS * SLICES * HOSTS))" \
      "--selector=app.kubernetes.io/instance=$NAME"
    ;;
esac
