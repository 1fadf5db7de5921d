#!/usr/bin/env bash
# Sets up .venv on first use and runs the test suite in parallel; extra arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
# Triton's interpreter is single-threaded Python; more threads than cores would only wait for each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Each worker and each of dozens of subprocesses would compile all sources, and pytest rewrite all tests, again.
unset PYTHONDONTWRITEBYTECODE
exec "$PYTHON" -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal --durations=10 "$@"
