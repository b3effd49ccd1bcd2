#!/usr/bin/env bash
# A job on this machine, started again where that helps. bash launch/local.sh --help
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=contract.sh
source "$(dirname "${BASH_SOURCE[0]}")/contract.sh"

usage() {
  cat <<'HELP'
bash launch/local.sh [--restarts=K] [--dry_run] train|sweep ARGUMENTS

Runs python -m sink_jax train|sweep ARGUMENTS in one process, on all devices of this machine:

  bash launch/local.sh --restarts=3 train --config=configs/base.py --workdir=runs/a

SIGTERM, Ctrl-C and SIGHUP reach it as SIGTERM: it saves; under nohup SIGHUP stays ignored.

  --restarts=K   starts again, at most K times, after exit code 42, or 128 or more; 0 by default
  --dry_run      loads the config, prints the command and runs nothing

HELP
  environment_help
}

restarts=0
while [[ ${1:-} == -* ]]; do
  case $1 in
    -h | --help) usage && exit ;;
    --restarts=*) restarts=${1#*=} ;;
    --dry_run) dry_run=yes ;;
    *) die "unknown option $1; see bash launch/local.sh --help" ;;
  esac
  shift
done
case ${1:-} in train | sweep) ;; *) die "train or sweep, and its arguments; see --help" ;; esac
[[ $restarts =~ ^[0-9]+$ ]] || die "--restarts=$restarts: a number."
if [[ -n $dry_run ]]; then check_job 0 "$@"; else prepare_environment; fi
command=("$RUN_PYTHON" -P -m sink_jax "$@")
if [[ -n $dry_run ]]; then quoted "${command[@]}" && exit; fi

asked_to_stop='' pid=''
trap 'asked_to_stop=yes; kill -TERM "$pid" 2>/dev/null || true' TERM INT HUP
for ((left = 10#$restarts; ; left--)); do
  "${command[@]}" </dev/null &
  pid=$!
  if [[ -n $asked_to_stop ]]; then kill -TERM "$pid" 2>/dev/null || true; fi # it came between two starts
  code=0
  wait "$pid" || code=$?
  # A signal ends `wait` before the process has ended.
  while kill -0 "$pid" 2>/dev/null; do wait "$pid" && code=0 || code=$?; done
  if ((left == 0)) || [[ -n $asked_to_stop ]] || ! may_restart "$code"; then exit "$code"; fi
  say "Exit code $code: starting again; restarts left: $((left - 1))."
  sleep "${RESTART_DELAY:-5}" || true
  if [[ -n $asked_to_stop ]]; then exit "$code"; fi
done
