#!/usr/bin/env bash
# Everything that needs a GPU, in one command and under 8 minutes: `bash benchmarks/run_gpu.sh [FOLDER] [--only PARTS]`.
#
# In order of worth: a minute's test of all kernels, stages and a rollout with CUDA graphs; what the goals are about; the
# rest, with the GPU's tests and compute-sanitizer (`gpu_parts.py`). Results go to FOLDER, or to $OUT, or to
# benchmarks/results, each as soon as it is measured. Run again, it goes on where it stopped; --only PART[,PART] measures
# those anew. A table comes last, and `python -m benchmarks.report --write` tells the pages.
#
# It needs torch, triton, pytest and pytest-benchmark, the trainer's packages for whole runs, and no network. It uses
# `python3` as it is (FASTP3O_PYTHON for another). Wheels in a folder .whl, if there is one, are unpacked for it. Without
# a GPU it does the same at small sizes.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ $# -eq 0 || "$1" == -* ]] && set -- "${OUT:-benchmarks/results}" "$@"
export FASTP3O_PYTHON="${FASTP3O_PYTHON:-python3}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
source scripts/setup.sh
if compgen -G ".whl/*.whl" > /dev/null; then
    SITE="$(mktemp -d)"
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$SITE" .whl/*.whl
    export PYTHONPATH="$SITE:$PYTHONPATH"
fi
device="${FASTP3O_DEVICE:-$("$PYTHON" -c 'import torch; print("gpu" if torch.cuda.is_available() else "cpu")')}"
exec "$PYTHON" -m benchmarks.gpu_parts --device "$device" "$@"
