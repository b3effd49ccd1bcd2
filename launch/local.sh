#!/usr/bin/env bash
# A job on this machine, in one process or several. bash launch/local.sh --help
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=contract.sh
source "$(dirname "${BASH_SOURCE[0]}")/contract.sh"

usage() {
  cat <<'HELP'
bash launch/local.sh [--processes=N] [--devices=M] [--restarts=K] [-- JOB ARGUMENTS]

Runs python -m sink_jax.JOB ARGUMENTS, such as

  bash launch/local.sh --processes=2 --devices=4 -- train --config=configs/base.py --workdir=runs/a

or, without --, the job of launch/settings.sh, in the repository, with its PROCESSES, DEVICES and
RESTARTS. SIGTERM, SIGINT and SIGHUP reach every process as SIGTERM: it saves; under nohup SIGHUP
stays ignored. A third Ctrl-C ends them at once, and so does the end of this script, should it be
killed.

  --processes=N  processes that are one job, found by a port of 127.0.0.1 (1). The GPUs that
                 are there, or those of CUDA_VISIBLE_DEVICES, are divided between them
  --devices=M    on the CPU, with so many simulated devices in each process
  --restarts=K   starts again, at most K times, what was stopped by others or has died (0)
  --grace=60     seconds that processes get after another one of them has failed or died
  --dry_run      prints the commands of the processes and runs nothing

Exit code: an error of any process, else 42 (saved: start it again) if one ends with it, else 0, or
the highest of those that died (127 and more: start it again as well).

HELP
  environment_help
}

processes='' devices='' restarts='' grace=60 job=()
while (($#)); do
  case $1 in
    -h | --help) usage && exit ;;
    --processes=*) processes=${1#*=} ;;
    --devices=*) devices=${1#*=} ;;
    --restarts=*) restarts=${1#*=} ;;
    --grace=*) grace=${1#*=} ;;
    --dry_run) dry_run=yes ;;
    --)
      shift
      (($#)) || wrong_usage 'after -- comes train or sweep, and its arguments'
      job=("$@")
      [[ -e $ROOT/sink_jax/${1//./\/}.py || -e $ROOT/sink_jax/$1/__main__.py ]] ||
        wrong_usage "there is no command $1"
      break
      ;;
    *) wrong_usage "unexpected argument $1 (those of the job stand after --)" ;;
  esac
  shift
done
if ((${#job[@]} == 0)); then
  load_settings
  [[ $SHARDS == 1 ]] || die "SHARDS=$SHARDS: this script runs a whole sweep; SHARDS=1." \
    'For one part: bash launch/local.sh -- sweep --shard=1/'"$SHARDS ..."
  settings_job ""
  cd "$ROOT"
  processes=${processes:-$PROCESSES} devices=${devices:-$DEVICES} restarts=${restarts:-$RESTARTS}
fi
processes=${processes:-1} restarts=${restarts:-0}
[[ $processes =~ ^[1-9][0-9]*$ ]] || wrong_usage "--processes=$processes: a number from 1 on"
[[ $devices =~ ^([1-9][0-9]*)?$ ]] || wrong_usage "--devices=$devices: a number from 1 on"
[[ $restarts =~ ^(0|[1-9][0-9]*)$ ]] || wrong_usage "--restarts=$restarts: a number from 0 on"
[[ $grace =~ ^(0|[1-9][0-9]*)$ ]] || wrong_usage "--grace=$grace: seconds"

# Sets gpus: one per process or more, or none.
find_gpus() {
  gpus=()
  if ((processes == 1)) || [[ -n $devices || ${JAX_PLATFORMS:-} == cpu ]]; then return; fi
  local found=${CUDA_VISIBLE_DEVICES:-}
  if [[ -z $found ]] && command -v nvidia-smi >/dev/null; then
    found=$(nvidia-smi --query-gpu=index --format=csv,noheader | tr '\n' ' ') || found=''
  fi
  read -r -a gpus <<<"${found//,/ }" || true
  ((${#gpus[@]} % processes == 0)) ||
    die "--processes=$processes cannot divide ${#gpus[@]} GPUs (${gpus[*]})." \
      'Choose another number, or GPUs with CUDA_VISIBLE_DEVICES=0,1'
}

# Sets port to one of 127.0.0.1 where nobody listens, below those that systems give out.
find_port() {
  port=$((20000 + (RANDOM + $$) % 12000))
  while (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do ((port += 1)); done
}

# Sets command: that of process $1.
process_command() {
  local share variables=("PYTHONPATH=$PYTHONPATH")
  if ((processes > 1)); then
    variables+=("JAX_COORDINATOR_ADDRESS=127.0.0.1:$port" "JAX_NUM_PROCESSES=$processes"
      "JAX_PROCESS_ID=$1")
  fi
  if [[ -n $devices ]]; then
    share=${XLA_FLAGS:+$XLA_FLAGS }--xla_force_host_platform_device_count=$devices
    variables+=(JAX_PLATFORMS=cpu "XLA_FLAGS=$share")
  elif ((${#gpus[@]})); then
    share=$((${#gpus[@]} / processes))
    share="${gpus[*]:$1 * share:share}"
    variables+=("CUDA_VISIBLE_DEVICES=${share// /,}")
  fi
  command=(env "${variables[@]}" "$RUN_PYTHON" -P -m "sink_jax.${job[0]}" "${job[@]:1}")
}

# Signals. A process leads a group, so that what it has started can be ended with it.
tell() {
  local i
  for i in ${pids[@]+"${!pids[@]}"}; do
    if [[ -z ${codes[i]:-} ]]; then kill "-$1" -- "$2${pids[i]}" 2>/dev/null || true; fi
  done
}

stop() {
  if [[ $1 == INT ]]; then ((interrupts += 1)); fi
  if ((interrupts == 2)); then say 'Saving. Once more Ctrl-C ends this at once.'; fi
  if ((interrupts > 2)); then tell KILL -; fi
  asked_to_stop=yes
  tell TERM ''
}

# Reads the processes of an attempt, a line each time, from a pipe that only this script writes to.
# Its end without a word is that of a script that was killed: they are ended then.
guard() {
  local line groups=''
  trap '' INT TERM HUP
  while read -r line; do groups=$line; done
  for line in $groups; do kill -KILL -- "-$line" 2>/dev/null || true; done
}

# One attempt; returns its exit code.
run_once() {
  local i
  pids=() codes=()
  if ((processes > 1)); then find_port; fi
  for ((i = 0; i < processes; i++)); do
    process_command "$i"
    if [[ -n $dry_run ]]; then
      echo "$(quoted "${command[@]}")$( ((processes == 1)) || echo ' &')"
      continue
    fi
    set -m
    "${command[@]}" </dev/null 8>&- &
    pids[i]=$!
    set +m
    echo "${pids[*]}" >&8
  done
  if [[ -n $dry_run ]]; then return; fi
  if [[ -n $asked_to_stop ]]; then tell TERM ''; fi # it came while they were starting
  watch_over
  for i in "${!pids[@]}"; do kill -KILL -- "-${pids[i]}" 2>/dev/null || true; done
  echo >&8
  return "$(verdict "${codes[@]}")"
}

# Waits for all processes; those that outlive another one's failure do so for GRACE seconds.
watch_over() {
  local i code deadline='' left=$processes
  while ((left)); do
    for i in "${!pids[@]}"; do
      if [[ -n ${codes[i]:-} ]] || kill -0 "${pids[i]}" 2>/dev/null; then continue; fi
      code=0
      wait "${pids[i]}" || code=$?
      codes[i]=$code
      ((left -= 1)) || true
      if ((code != 0 && code != 42)) && ((processes > 1)); then
        if ((code > 128)); then
          say "Process $i died of signal $((code - 128)) (exit code $code)."
        else
          say "Process $i failed with exit code $code."
        fi
        if [[ -z $deadline ]]; then deadline=$((SECONDS + grace)); fi
      fi
    done
    if ((left)) && [[ -n $deadline ]] && ((SECONDS >= deadline)); then
      say "The others have not ended within $grace s of that: killed."
      tell KILL -
      for i in "${!pids[@]}"; do
        if [[ -n ${codes[i]:-} ]]; then continue; fi
        wait "${pids[i]}" || true
        codes[i]=0 # no fault of theirs
      done
      return
    fi
    if ((left)); then sleep 0.2; fi
  done
}

find_gpus
choose_python
pids=() codes=() interrupts=0
if [[ -z $dry_run ]]; then exec 8> >(set -m; guard <&0 &); fi # in a group of its own
trap 'stop TERM' TERM HUP
trap 'stop INT' INT
until_done "$restarts" run_once
