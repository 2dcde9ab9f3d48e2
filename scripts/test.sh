#!/usr/bin/env bash
# Runs the tests and the doctests; arguments go to pytest (default: everything, two workers).
# The first run makes the environment, see scripts/environment.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
. scripts/environment.sh
use_environment test

if [ $# -eq 0 ]; then
    set -- --numprocesses 2 --dist loadfile --quiet
fi
exec "$VENV_PYTHON" -m pytest "$@"
