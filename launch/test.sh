#!/usr/bin/env bash
# The tests, in an environment of their own. bash launch/test.sh --help
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case ${1:-} in
  -h | --help)
    cat <<'HELP'
bash launch/test.sh [--full] [arguments of pytest]

Runs the tests on the CPU. Paths among the arguments start at the repository.

  --full             also the tests that go through every combination
  WORKERS=2          processes to run them in; 0: all in one, as a debugger needs
  JAX_PLATFORMS=cpu  set it to run the tests on another device

HELP
    environment_help
    exit
    ;;
esac

prepare_environment
cd "$ROOT"
workers=(-n "${WORKERS:-2}")
if [[ ${WORKERS:-2} == 0 ]]; then workers=(); fi # then pytest-xdist is not needed either
exec "$RUN_PYTHON" -P -m pytest -q --durations=10 ${workers[@]+"${workers[@]}"} "$@"
