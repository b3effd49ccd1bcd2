#!/usr/bin/env bash
# Sourced by the launchers: settings, dry runs, and what exit codes ask for.
#
#   read_action, do_or_say   arguments of a launcher, and commands that --dry_run only prints
#   load_settings, need      launch/settings.sh, or the file that SETTINGS names
#   settings_job             sets job: what settings say about the command
#   verdict, until_done      exit codes of several processes as one; starting again
#
# Exit codes of a job: 0 is done; 42 is saved, start it again; 127 and more is dead, start it
# again; any other is an error, where a person has to look. Runs on bash 3.2.

# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

EXAMPLE=$ROOT/launch/settings.example.sh
SETTINGS=${SETTINGS:-$ROOT/launch/settings.sh}
dry_run=''
# shellcheck disable=SC2034 # set by the signal handlers of the script that sources this one
asked_to_stop=''

wrong_usage() {
  say "error: $1; see bash ${0#"$PWD"/} --help"
  exit 2
}

# read_action CHOICES ARGUMENTS...: sets action to the one that is among CHOICES, and dry_run.
# The script has a function `usage`.
read_action() {
  local choices=$1 argument
  shift
  action=''
  for argument in "$@"; do
    case $argument in
      -h | --help) usage && exit ;;
      --dry_run) dry_run=yes ;;
      *)
        [[ -z $action && " $choices " == *" $argument "* ]] ||
          wrong_usage "unexpected argument $argument"
        action=$argument
        ;;
    esac
  done
  [[ -n $action ]] || wrong_usage "one of: ${choices// /, }"
}

# A command line as a shell reads it.
quoted() {
  local line
  printf -v line '%q ' "$@"
  printf '%s\n' "${line% }"
}

do_or_say() { if [[ -n $dry_run ]]; then quoted "$@"; else "$@"; fi; }

needs_program() {
  [[ -n $dry_run ]] || command -v "$1" >/dev/null || die "$1 is not installed." "$2"
}

# Sets RUN_PYTHON, as prepare_environment does; a dry run installs nothing.
# shellcheck disable=SC2034 # read by the script that sources this one
choose_python() {
  if [[ -z $dry_run ]]; then
    prepare_environment
  else
    RUN_PYTHON=${VENV:-$ROOT/.venv}/bin/python
    if [[ ${VENV:-} == none ]]; then RUN_PYTHON=${PYTHON:-python3}; fi
    PYTHONPATH=$ROOT
  fi
}

# Sets yaml_python, the first Python that has PyYAML.
find_yaml_python() {
  for yaml_python in "${PYTHON:-}" "$ROOT/.venv/bin/python" python3; do
    if [[ -n $yaml_python ]] && "$yaml_python" -c 'import yaml' 2>/dev/null; then return; fi
  done
  die 'no Python with PyYAML is here.' 'Make the environment: bash launch/test.sh --version' \
    'or name one: PYTHON=/path/to/python3'
}

# Settings that an older settings.sh lacks have the example's value.
load_settings() {
  [[ -f $SETTINGS ]] || die "there is no $SETTINGS." \
    "Make it and fill it in: cp launch/settings.example.sh launch/settings.sh"
  # shellcheck source=settings.example.sh
  source "$EXAMPLE"
  # shellcheck source=settings.example.sh
  source "$SETTINGS"
  need NAME JOB
  [[ $NAME =~ ^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$ ]] ||
    die "NAME=$NAME: at most 40 small letters, digits and -, first a letter."
  case $JOB in train | sweep) ;; *) die "JOB=$JOB: train or sweep." ;; esac
  local name
  # Every setting that is a number in the example is one here.
  while read -r name; do
    [[ ${!name} =~ ^(0|[1-9][0-9]*)$ ]] || die "$name=${!name}: a whole number."
    case $name in
      RESTARTS | CHIPS | SLURM_GPUS) ;;
      *) [[ ${!name} != 0 ]] || die "$name=0: at least 1." ;;
    esac
  done < <(sed -n 's/^\([A-Z_]*\)=[0-9][0-9]* .*/\1/p' "$EXAMPLE")
  [[ $SHARDS == 1 || $JOB == sweep ]] || die "SHARDS=$SHARDS: only a sweep has parts; JOB=sweep?"
}

# need NAMES...: all of these settings have a value, or a message lists those that do not.
need() {
  local name missing=()
  for name in "$@"; do
    if [[ -z ${!name} ]]; then
      missing+=("$(sed -n "s/^$name=[^ ]*  *# /$name: /p" "$EXAMPLE")")
    fi
  done
  if ((${#missing[@]})); then die "empty in $SETTINGS:" "${missing[@]}"; fi
}

# Sets job: the arguments after python -m sink_jax., the first of which is train or sweep.
# settings_job K: those of part K of SHARDS.
settings_job() {
  local source="PackedDataset(path='$DATA')"
  need CONFIG WORKDIR
  job=("$JOB" "--config=$CONFIG" "--workdir=$WORKDIR")
  case $DATA in
    '') ;;
    *[\'\\]*) die "DATA=$DATA: no quotes and backslashes in this path." ;;
    *) case $JOB in
      train) job+=("--config.data.source=$source") ;;
      sweep) job+=("--set=data.source=$source") ;;
    esac ;;
  esac
  job+=(${ARGUMENTS[@]+"${ARGUMENTS[@]}"})
  if [[ -n ${1:-} && $SHARDS != 1 ]]; then job+=("--shard=$1/$SHARDS"); fi
}

# needs_shared_paths [BUCKET]: WORKDIR and DATA are where machines without this one's disks find
# them. BUCKET: where a container finds its checkpoints again, which no path inside it is.
needs_shared_paths() {
  local name
  for name in WORKDIR DATA; do
    case ${!name} in
      '' | gs://*) ;;
      /*)
        [[ -z ${1:-} || $name == DATA ]] ||
          die "WORKDIR=$WORKDIR: lost with the machine; it has to be gs://BUCKET/PATH."
        ;;
      *) die "$name=${!name}: the hosts need gs://BUCKET/PATH, or an absolute path on a disk" \
        'that all of them mount.' ;;
    esac
  done
}

# verdict CODES...: prints the exit code of a job whose processes ended with these. An error
# counts for more than the deaths of others that it caused.
verdict() {
  local code error=0 saved='' dead=0
  for code in "$@"; do
    if ((code == 42)); then
      saved=yes
    elif ((code >= 127)); then
      if ((code > dead)); then dead=$code; fi
    elif ((code > error)); then
      error=$code
    fi
  done
  if ((error)); then echo "$error"; elif [[ -n $saved ]]; then echo 42; else echo "$dead"; fi
}

may_restart() { (($1 == 42 || $1 >= 127)); }

# until_done RESTARTS COMMAND...: runs it again while its exit code asks for that; not once
# asked_to_stop is set. Returns the last exit code.
until_done() {
  local left=$1 code
  shift
  while :; do
    code=0
    "$@" || code=$?
    if ((left == 0)) || [[ -n $asked_to_stop ]] || ! may_restart "$code"; then return "$code"; fi
    say "Exit code $code: starting again; restarts left: $((left -= 1))."
    sleep "${RESTART_DELAY:-5}" || true
    if [[ -n $asked_to_stop ]]; then return "$code"; fi
  done
}
