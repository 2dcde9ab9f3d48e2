#!/usr/bin/env bash
# Shows Engram at work on real text: tokens, hash rows, prefill, decoding, gates.
# Arguments go to scripts/infer.py, e.g. --text FILE or --checkpoint DIR.
# The first run makes the environment, see scripts/environment.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
. scripts/environment.sh
use_environment demo

exec "$VENV_PYTHON" scripts/infer.py "$@"
