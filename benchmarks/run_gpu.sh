#!/usr/bin/env bash
# Tests, kernel benchmark and quickstart on a CUDA machine that has torch: `bash benchmarks/run_gpu.sh [FOLDER]`.
# Results go to FOLDER, or to $OUT, or to benchmarks/results. Uses `python3` as it is (FASTP3O_PYTHON for another).
set -uo pipefail
cd "$(dirname "$0")/.."
RESULTS="${1:-${OUT:-benchmarks/results}}"
mkdir -p "$RESULTS"
export FASTP3O_PYTHON="${FASTP3O_PYTHON:-python3}" PYTHONUNBUFFERED=1

timeout 240 bash scripts/test.sh tests/kernels -q > "$RESULTS/tests.log" 2>&1
tests=$?
source scripts/setup.sh
timeout 90 "$PYTHON" benchmarks/logits_level.py --output "$RESULTS/logits_level.json" > "$RESULTS/logits_level.log" 2>&1
benchmark=$?
FASTP3O_RUN="$RESULTS/quickstart" timeout 140 bash scripts/quickstart.sh > "$RESULTS/quickstart.log" 2>&1
quickstart=$?
rm -rf "$RESULTS"/quickstart/{data,init} "$RESULTS"/quickstart/*/{model,state} # figures and metrics are what is kept

tail -n 1 "$RESULTS/tests.log"
tail -n 12 "$RESULTS/logits_level.log"
tail -n 8 "$RESULTS/quickstart.log"
echo "exit codes: tests $tests, logits-level benchmark $benchmark, quickstart $quickstart"
exit $((tests || benchmark || quickstart))
