#!/usr/bin/env bash
# Shows Engram at work on real text: tokens, hash rows, prefill, decoding, gates.
# Arguments go to scripts/infer.py, e.g. --text FILE or --checkpoint DIR.
# The first run makes the environment, see scripts/environment.sh.
set -euo pipefail
started_in=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
project=$PWD
# shellcheck source=scripts/environment.sh
. scripts/environment.sh
use_environment demo

# Paths among the arguments are the caller's.
cd "$started_in"
exec "$VENV_PYTHON" "$project/scripts/infer.py" "$@"
