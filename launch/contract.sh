#!/usr/bin/env bash
# Sourced by the launchers: settings, dry runs, the check of a job, and the exit codes.
#
# Exit codes of a job: 0 is done; 42 is saved, start it again; 175 is a failure that may pass, and 128 and
# more is dead: start it again; any other is an error that a person must correct, also 126 and 127, a command
# that is not there.

# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
SECRETS='WANDB_API_KEY HF_TOKEN'
SETTINGS=${SETTINGS:-$ROOT/launch/settings.sh}
dry_run=''

may_restart() { (($1 == 42 || $1 >= 128)); }

# A command line as a shell reads it.
quoted() {
  local line
  printf -v line '%q ' "$@"
  printf '%s\n' "${line% }"
}

do_or_say() { if [[ -n $dry_run ]]; then quoted "$@"; else "$@"; fi; }

# read_action CHOICES ARGUMENTS...: sets action to the one of CHOICES, and dry_run.
read_action() {
  local argument
  action=''
  for argument in "${@:2}"; do
    case " $1 --help -h --dry_run " in *" $argument "*) ;; *) die "unexpected $argument; try --help" ;; esac
    case $argument in -h | --help) usage && exit ;; --dry_run) dry_run=yes ;; *) action=$argument ;; esac
  done
  [[ -n $action ]] || die "one of: $1; try --help"
}

# need NAMES...: all of these settings have a value.
need() {
  local name
  for name in "$@"; do
    [[ -n ${!name} ]] || die "$SETTINGS: $(grep "^$name=" "$ROOT/launch/settings.example.sh")"
  done
}

# Reads the settings and sets job: the arguments of python -m sink_jax, and environment: what runs before it.
read_settings() {
  [[ -f $SETTINGS ]] || die "there is no $SETTINGS:" 'cp launch/settings.example.sh launch/settings.sh'
  # shellcheck source=settings.example.sh
  source "$ROOT/launch/settings.example.sh"
  # shellcheck source=settings.example.sh
  source "$SETTINGS"
  need NAME JOB CONFIG WORKDIR PROJECT ZONE TPU_TYPE
  case $TPU_TYPE in
    v5e-*) die "TPU_TYPE=$TPU_TYPE: Google Cloud calls it v5litepod-${TPU_TYPE#v5e-}." ;;
    v7x-*) die "TPU_TYPE=$TPU_TYPE: Google Cloud calls it tpu7x-..., by its cores, two of a chip." ;;
    v[2-6]*-[0-9]* | tpu7x-[0-9]*) ;;
    *) die "TPU_TYPE=$TPU_TYPE: an accelerator type, such as v5litepod-256, v5p-128 or v6e-64." ;;
  esac
  [[ $WORKDIR == gs://* ]] || die "WORKDIR=$WORKDIR: no disk outlives the hosts; it has to be gs://BUCKET/PATH."
  job=("$JOB" "--config=$CONFIG" "--workdir=$WORKDIR")
  if [[ -n $DATA ]]; then job+=("--config.data.source=PackedDataset(path='$DATA')"); fi
  job+=(${ARGUMENTS[@]+"${ARGUMENTS[@]}"})
  # The hosts share compiled programs: only the first writes them.
  local next_to=$WORKDIR
  case $WORKDIR in gs://*/*) next_to=${WORKDIR%/*} ;; esac
  # shellcheck disable=SC2034 # the launchers use it
  environment=(env "SINK_JAX_COMPILE_CACHE=$next_to/compiled")
  local flags=$COMPILER_FLAGS
  # Otherwise a slice whose partner has died waits for it.
  if ((SLICES > 1)); then flags="--megascale_abort_on_hangs=true${flags:+ $flags}"; fi
  if [[ -n $flags ]]; then environment+=("LIBTPU_INIT_ARGS=$flags"); fi
}

# secrets FORMAT: NAME=VALUE lines of the variables in SECRETS that are set here; the format of a value is %q
# for a shell. They go into files, never into a command line, which is printed and which everybody on a host
# can read.
secrets() {
  local name
  for name in $SECRETS; do
    if [[ -n ${!name:-} ]]; then
      # shellcheck disable=SC2059
      printf "%s=$1\n" "$name" "${!name}"
    fi
  done
}

# check_job DEVICES JOB ARGUMENTS...: loads the config of a job; of training it compares the mesh and
# the batch with the devices (0: not known). remote=yes: other machines have to find the corpus.
remote=''
check_job() {
  local dry=(--dry_run)
  if [[ $2 == train ]]; then dry+=("--devices=$1"); fi
  if [[ -n $remote ]]; then dry+=(--remote); fi
  prepare_environment
  "$RUN_PYTHON" -P -m sink_jax "${@:2}" "${dry[@]}" >&2 || exit 1
}

# tpu_devices TYPE SLICES: the devices that jax sees; v4 and v5p are named by their cores, two each.
tpu_devices() {
  local count=$((${1##*-} * $2))
  case $1 in v4-* | v5p-*) count=$((count / 2)) ;; esac
  echo "$count"
}

# plan_job SLICES: prints the memory and the time of the job, compiled on this machine.
plan_job() {
  prepare_environment
  do_or_say "$RUN_PYTHON" -P -m sink_jax plan "--topology=$TPU_TYPE" "--slices=$1" "--config=$CONFIG" \
    ${DATA:+"--config.data.source=PackedDataset(path='$DATA')"} ${ARGUMENTS[@]+"${ARGUMENTS[@]}"}
}
