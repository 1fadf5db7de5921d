#!/usr/bin/env bash
# Everything that needs a GPU in one command: `bash benchmarks/run_gpu.sh [FOLDER] [CALL ...] [--only PARTS]`.
#
# Three calls, in order of worth (`gpu_parts.py`). `first`, 7 minutes: a minute's test of all kernels, stages and a rollout
# with CUDA graphs; where the time of an update goes; a whole iteration beside TRL's; a run whose reward rises. `second`, 7
# minutes: compiled layers, the head and its peers, packing, rollouts. `rest`, 8 minutes: other levels, the GPU's tests and
# compute-sanitizer. All of them by default.
#
# Results go to FOLDER, by default benchmarks/results, each as soon as it is measured; what has results there is not
# measured again, so a call goes on where the one before it stopped. --only PART[,PART] measures those anew. A table comes
# last, and `python -m benchmarks.report --write` tells the pages. If $OUT is set, the record and an archive of the parts'
# files and logs are left there, too.
#
# It needs torch, triton, pytest and pytest-benchmark, the trainer's packages for whole runs, and no network. It uses
# `python3` as it is (FASTP3O_PYTHON for another). Wheels in folders .whl*, if there are any, are unpacked for it; one that
# is too large to be sent may lie there in pieces (`split --bytes=40M NAME.whl NAME.whl.piece-`), which are joined. Without a
# GPU it does the same at small sizes.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in
    "" | -* | first | second | rest) set -- benchmarks/results "$@" ;;
esac
export FASTP3O_PYTHON="${FASTP3O_PYTHON:-python3}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
# As every run of the trainer has it.
[[ -n "${PYTORCH_CUDA_ALLOC_CONF:-}" ]] || export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
source scripts/setup.sh
if compgen -G ".whl*/*.whl*" > /dev/null; then
    SITE="$(mktemp -d)" WHEELS="$(mktemp -d)"
    "$PYTHON" benchmarks/wheels.py "$WHEELS" .whl*/*
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$SITE" "$WHEELS"/*.whl
    export PYTHONPATH="$SITE:$PYTHONPATH"
fi
device="${FASTP3O_DEVICE:-$("$PYTHON" -c 'import torch; print("gpu" if torch.cuda.is_available() else "cpu")')}"
keep() { # also of a run that is ended from outside
    if [[ -n "${OUT:-}" && -f "$1/kernels.$device.json" ]]; then
        cp "$1/kernels.$device.json" "$OUT"
        tar -czf "$OUT/parts.tar.gz" -C "$1" parts
    fi
}
"$PYTHON" -m benchmarks.gpu_parts --device "$device" "$@" &
running=$!
trap 'kill "$running"; wait "$running" || true; exit 143' TERM INT
trap 'keep "$1"' EXIT
wait "$running"
