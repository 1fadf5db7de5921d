#!/usr/bin/env bash
# For a nightly job: whether fastp3o works with the releases of the day, before users meet them. Makes an environment in
# .newest (2 GB or more, some minutes, each time from scratch) with the newest of everything that the package index
# serves, also beyond our own upper bounds. torch alone, whose builds are gigabytes, is that of constraints.txt. Prints
# the versions that it took, makes one update of SFT, LoRA and P3O by commands and from Python, and runs the tests of
# engine, models and loading. If all pass, the bounds of pyproject.toml and constraints.txt can move to these versions.
set -euo pipefail
cd "$(dirname "$0")/.."
env="$PWD/.newest"
"${FASTP3O_PYTHON:-python3}" -m venv --clear "$env"
grep -E '^(torch|triton)==' scripts/constraints.txt > "$env/constraints.txt"
pip=("$env/bin/python" -m pip --disable-pip-version-check install --quiet --constraint "$env/constraints.txt")
"${pip[@]}" packaging # newest.py reads our requirements with it
"$env/bin/python" scripts/newest.py > "$env/requirements.txt"
"${pip[@]}" --requirement "$env/requirements.txt"
"${pip[@]}" --no-deps . # pip would keep to our bounds
echo "== The newest releases"
"$env/bin/python" scripts/newest.py --taken

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH=
"$env/bin/python" scripts/make_stories.py --output_dir "$env/runs" --demonstrations 16 --comparisons 16
cp scripts/make_stories.py "$env/runs" # its reward
(
    cd "$env/runs" # where Python finds what is installed, not the clone
    shared=(--max_prompt_tokens 12 --max_response_tokens 16 --report_to none)
    sft=(fastp3o sft --model init --train_data stories.jsonl --batch_size 16 --epochs 1 "${shared[@]}")
    p3o=(fastp3o p3o --prompts prompts.jsonl --reward make_stories:taste "${shared[@]}")
    p3o+=(--updates 1 --prompts_per_update 8 --samples_every 0)
    PATH="$env/bin:$PATH"
    echo "== One update of each by commands"
    "${sft[@]}" --output_dir sft
    "${sft[@]}" --output_dir lora --lora_rank 4
    "${p3o[@]}" --output_dir p3o --model sft/model
    "${p3o[@]}" --output_dir p3o_lora --model lora/adapter --lora_rank 4
    echo "== One update of each from Python"
    python - <<'END'
from fastp3o import P3OConfig, SFTConfig, train
from make_stories import taste

shared = {"max_prompt_tokens": 12, "max_response_tokens": 16, "report_to": "none"}
sft = SFTConfig(model="init", output_dir="sft_2", train_data="stories.jsonl", batch_size=16, epochs=1, **shared)
train(sft)
p3o = {"prompts_per_update": 8, "updates": 1, "samples_every": 0, **shared}
for name, adapted in {"p3o_2": {}, "p3o_lora_2": {"lora_rank": 4}}.items():
    config = P3OConfig(model="sft_2/model", output_dir=name, **adapted, **p3o)
    result = train(config, prompts=[{"prompt": "tell of the old fox :"}] * 8, reward=taste)
    print(f"{name}: reward {result.history['reward'].item()}")
END
)
echo "== Tests of engine, models and loading"
"$env/bin/python" -m pytest --quiet -p no:cacheprovider --numprocesses auto --maxprocesses 8 \
    tests/fastp3o/models tests/fastp3o/rollouts/test_engine.py tests/fastp3o/rollouts/test_engine_sampler.py
