#!/usr/bin/env bash
# Sets up .venv on first use and runs the test suite; extra arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
exec "$PYTHON" -m pytest --durations=10 "$@"
