# Sourced by quickstart.sh and test.sh: leaves the interpreter to use in $PYTHON, with fastp3o and all it needs installed.
#
# FASTP3O_PYTHON=/path/to/python uses that interpreter as it is and installs nothing, for machines whose torch must not be
# replaced (a cluster image) or that have no network.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -n "${FASTP3O_PYTHON:-}" ]]; then
    PYTHON="$FASTP3O_PYTHON"
    export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
else
    PYTHON="$PWD/.venv/bin/python"
    wanted="$(cat pyproject.toml scripts/constraints.txt)"
    if [[ ! -f .venv/installed || "$(cat .venv/installed)" != "$wanted" ]]; then
        if [[ ! -x "$PYTHON" ]]; then
            echo "Creating .venv"
            python3 -m venv .venv
        fi
        echo "Installing fastp3o and its dependencies into .venv (the first time takes a few minutes)"
        "$PYTHON" -m pip install --quiet --disable-pip-version-check --constraint scripts/constraints.txt --editable '.[dev]'
        printf '%s\n' "$wanted" > .venv/installed
    fi
fi

"$PYTHON" - <<'EOF'
import sys
if sys.version_info < (3, 11):
    sys.exit(f"fastp3o needs Python 3.11 or newer, and this is {sys.version.split()[0]}")
EOF
