# Sourced by quickstart.sh, test.sh and .ci/run: leaves the interpreter to use in $PYTHON, with fastp3o and all it needs.
#
# FASTP3O_PYTHON=/path/to/python uses that interpreter as it is and installs nothing, for machines whose torch must not be
# replaced (a cluster image) or that have no network. FASTP3O_EXTRAS=dev,integrations adds the trainers that fastp3o is
# integrated into.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

require_python() { # stops where the interpreter is too old, before an installer says so in more words
    "$1" - <<'END'
import sys
if sys.version_info < (3, 11):
    sys.exit(f"fastp3o needs Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}")
END
}

if [[ -n "${FASTP3O_PYTHON:-}" ]]; then
    PYTHON="$FASTP3O_PYTHON"
    require_python "$PYTHON"
    export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
else
    PYTHON="$PWD/.venv/bin/python"
    extras="${FASTP3O_EXTRAS:-dev}"
    wanted="$extras
$(cat pyproject.toml scripts/constraints.txt)"
    if [[ ! -f .venv/installed || "$(cat .venv/installed)" != "$wanted" ]] || ! "$PYTHON" -c '' 2> /dev/null; then
        # What an attempt without python3-venv, or one that was interrupted, has left has no pip.
        if ! "$PYTHON" -m pip --version > /dev/null 2>&1; then
            require_python python3
            # An environment whose Python is gone is made anew; any other only gets what it lacks.
            if "$PYTHON" -c '' 2> /dev/null; then python3 -m venv .venv; else python3 -m venv --clear .venv; fi
        fi
        echo "== Installing fastp3o and what it needs into .venv (a few minutes, once)"
        if ! "$PYTHON" -m pip install --disable-pip-version-check --constraint scripts/constraints.txt \
            --editable ".[$extras]" > .venv/install.log 2>&1; then
            cat .venv/install.log >&2
            exit 1
        fi
        # Python started beside the clone would take its folder, which has the package's name, for the package.
        site="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
        printf '%s\n' "$PWD" "$PWD/kernels" > "$site/fastp3o_clone.pth"
        printf '%s\n' "$wanted" > .venv/installed
    fi
fi
