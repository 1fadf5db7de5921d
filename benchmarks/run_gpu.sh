#!/usr/bin/env bash
# Everything that needs a GPU, in one command and under 8 minutes: `bash benchmarks/run_gpu.sh [FOLDER]`.
#
# On a CUDA machine that has torch, triton and pytest-benchmark it runs the kernels' tests, compute-sanitizer if that is
# installed, and the benchmark suite with the peers that are installed, and prints a short table last. Whole updates of a
# policy need the trainer's packages; without them the rest is measured. Results go to FOLDER, or to $OUT, or to
# benchmarks/results. It uses `python3` as it is (FASTP3O_PYTHON for another). Wheels in a folder .whl, if there is one,
# are unpacked for it: pytest-benchmark and peers for a machine without a network. Without a GPU it does the same at
# small sizes.
set -uo pipefail
cd "$(dirname "$0")/.."
RESULTS="${1:-${OUT:-benchmarks/results}}"
mkdir -p "$RESULTS"
RESULTS="$(cd "$RESULTS" && pwd)"
STARTED=$SECONDS
export FASTP3O_PYTHON="${FASTP3O_PYTHON:-python3}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
source scripts/setup.sh
if compgen -G ".whl/*.whl" > /dev/null; then
    SITE="$(mktemp -d)"
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$SITE" .whl/*.whl
    export PYTHONPATH="$SITE:$PYTHONPATH"
fi
device=$("$PYTHON" -c 'import torch; print("gpu" if torch.cuda.is_available() else "cpu")') || exit 1

# run SECONDS LOG COMMAND...: stops a part that hangs, so that it does not take the others' time.
run() {
    local seconds=$1 log=$2
    shift 2
    timeout --kill-after=5 "$seconds" "$@" > "$RESULTS/$log" 2>&1
    local code=$?
    [[ $code -eq 124 || $code -eq 137 ]] && echo "stopped after $seconds seconds" >> "$RESULTS/$log"
    return $code
}

# Kernels compile for most tests: one process for each file.
files=(tests/kernels/test_*.py tests/kernels/*/test_*.py)
[[ $device == cpu ]] && files=(tests/kernels/rows/test_token_logprobs.py tests/kernels/head/test_linear_logprobs.py)
mkdir -p "$RESULTS/tests"
processes=()
for file in "${files[@]}"; do
    [[ $file == *test_compile.py ]] && continue
    name="${file#tests/kernels/}"
    run 150 "tests/${name//\//-}.log" "$PYTHON" -m pytest "$file" -q -p no:cacheprovider --durations=3 &
    processes+=($!)
done
# The trainer's tests on a GPU: the attention's backends, and whole runs in every precision.
run 150 tests/test_trainer.log "$PYTHON" -m pytest tests/fastp3o/models/test_attention.py tests/fastp3o/models/test_reference.py \
    tests/fastp3o/models/test_packed_model.py tests/fastp3o/stages/test_online.py -k "gpu or flash or varlen or first_ratio or half_precision" \
    -q -p no:cacheprovider --durations=3 &
processes+=($!)
# The engine's: CUDA graphs, compiled steps.
run 150 tests/test_engine.log "$PYTHON" -m pytest tests/fastp3o/rollouts/test_engine_on_gpu.py -q -p no:cacheprovider --durations=3 &
processes+=($!)
tests=0
for process in "${processes[@]}"; do
    wait "$process" || tests=1
done
tail -n +1 "$RESULTS"/tests/*.log > "$RESULTS/tests.log"
rm -r "$RESULTS/tests"

sanitizer="compute-sanitizer is absent"
if [[ $device == gpu ]] && command -v compute-sanitizer > /dev/null; then
    run 40 sanitizer.log compute-sanitizer --error-exitcode 9 "$PYTHON" -m benchmarks.small_case
    sanitizer="compute-sanitizer: exit code $?"
fi

left=$((440 - (SECONDS - STARTED)))
FASTP3O_BENCHMARK_SECONDS=$((left - 50)) run "$left" benchmarks.log "$PYTHON" -m pytest benchmarks -q -p no:cacheprovider \
    --continue-on-collection-errors --benchmark-disable-gc --results="$RESULTS/kernels.$device.json"
benchmarks=$?

grep -E "passed|failed|error|stopped after|^FAILED" "$RESULTS/tests.log"
echo "$sanitizer"
"$PYTHON" -m benchmarks.report "$RESULTS/kernels.$device.json"
echo "$((SECONDS - STARTED)) s; exit codes: tests $tests, benchmarks $benchmarks"
exit $((tests || benchmarks))
