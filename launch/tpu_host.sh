#!/usr/bin/env bash
# One host of a TPU VM; launch/tpu_vm.sh calls it on all of them. bash launch/tpu_host.sh --help
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=contract.sh
source "$(dirname "${BASH_SOURCE[0]}")/contract.sh"

usage() {
  cat <<'HELP'
bash launch/tpu_host.sh setup PYTHON           installs into .venv, with jax for TPUs
bash launch/tpu_host.sh run ARGUMENTS          starts launch/local.sh ARGUMENTS and lets go of it:
                                               it outlives the connection
bash launch/tpu_host.sh logs                   what it writes, until Ctrl-C
bash launch/tpu_host.sh stop SECONDS           tells it to save and end, and waits
HELP
}

folder=$ROOT/runs/host
pid='' # of the job, if it runs
if [[ -f $folder/pid ]] && kill -0 "$(<"$folder/pid")" 2>/dev/null; then pid=$(<"$folder/pid"); fi

setup() {
  local python=$1
  if ! command -v "$python" >/dev/null; then
    sudo apt-get update -qq || true
    sudo apt-get install -y -qq "$python" "$python-venv" ||
      die "TPU_PYTHON=$python is not here, and apt-get has none." \
        'Choose 3.11, 3.12 or 3.13, whichever this image has packages of.'
  fi
  VENV=$ROOT/.venv PYTHON=$python prepare_environment
  pip_install "$RUN_PYTHON" -c "$ROOT/requirements.txt" 'jax[tpu]' 'etils[epath-gcs]'
}

run() {
  [[ -z $pid ]] || die "a job runs here (process $pid)." 'Stop it first: bash launch/tpu_vm.sh stop'
  mkdir -p "$folder"
  nohup bash "$ROOT/launch/local.sh" "$@" >>"$folder/log" 2>&1 </dev/null &
  echo $! >"$folder/pid"
  say "$(hostname): started as process $!"
}

stop() {
  local deadline=$((SECONDS + $1))
  if [[ -z $pid ]]; then
    say "$(hostname): nothing runs"
    return
  fi
  kill -TERM "$pid"
  while kill -0 "$pid" 2>/dev/null; do
    if ((SECONDS >= deadline)); then die "$(hostname): process $pid still runs after $1 s."; fi
    sleep 0.5
  done
  say "$(hostname): has ended; the last lines of its log:"
  tail -n 3 "$folder/log"
}

case ${1:-} in
  -h | --help) usage ;;
  setup | stop)
    (($# == 2)) || wrong_usage "$1 takes one argument"
    "$@"
    ;;
  run) "$@" ;;
  logs) exec tail -n 100 -F "$folder/log" ;;
  *) wrong_usage 'one of: setup, run, logs, stop' ;;
esac
