#!/usr/bin/env bash
# From comparisons to P3O in two minutes: a small Llama learns to tell stories, a reward model learns a hidden taste from
# noisy comparisons, and P3O follows it. What no stage has seen, the taste itself, says at the end whether it got better.
# Run again, it goes on where it stopped.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
source scripts/stage.sh
# Models this small gain nothing from more threads, which wait for each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

SEED="${FASTP3O_SEED:-0}" # of the data and of every stage
RUN="${FASTP3O_RUN:-runs/quickstart}"
DATA="$RUN/data"

if [[ ! -f "$DATA/done" ]]; then
    echo "== Data and model: stories in plain words, raters who like cheerful ones, an untrained Llama"
    "$PYTHON" scripts/make_stories.py --output_dir "$DATA" --seed "$SEED"
    touch "$DATA/done"
fi

shared=(--seed "$SEED" --max_prompt_tokens 12 --max_response_tokens 32 --tokens_per_row 2048)
stage "Stage 1: supervised fine-tuning, on stories of every mood" sft "$RUN/sft" "${shared[@]}" \
    --model "$DATA/init" --train_data "$DATA/stories.jsonl" --epochs 4 --batch_size 64 --learning_rate 4e-3 \
    --lr_schedule cosine --warmup_steps 5
stage "Stage 2: reward model, from comparisons in which raters make mistakes" reward "$RUN/reward_model" \
    "${shared[@]}" --model "$RUN/sft/model" --train_data "$DATA/comparisons.jsonl" \
    --eval_data "$DATA/comparisons.eval.jsonl" --epochs 3 --batch_size 64 --learning_rate 2e-3 \
    --lr_schedule cosine --warmup_steps 10
stage "Stage 3: P3O, from four stories to each prompt and the differences of their rewards" p3o "$RUN/p3o" \
    "${shared[@]}" --model "$RUN/sft/model" --reward "$RUN/reward_model/model" \
    --prompts "$DATA/prompts.jsonl" --eval_prompts "$DATA/prompts.eval.jsonl" --eval_every 5 \
    --gold_reward make_stories:taste --eval_responses_per_prompt 8 --updates 25 --prompts_per_update 32 \
    --prompts_per_minibatch 16 --responses_per_prompt 4 --inner_epochs 1 --learning_rate 5e-4 --warmup_steps 2 \
    --kl_coef 0.1 --samples_every 0

echo "== Result: the raters' true taste, which no stage has seen, on prompts that no stage has seen"
"$PYTHON" scripts/before_after.py --before "$RUN/sft/model" --after "$RUN/p3o/model" \
    --prompts "$DATA/prompts.eval.jsonl" --reward make_stories:taste --seed "$SEED" \
    --output "$RUN/before_after.png"
echo "With your model and data: fastp3o p3o --model NAME --prompts FILE.jsonl --reward FILE.py:FUNCTION --output_dir runs/mine"
echo "Real text, and a reward model that is soon exploited: bash scripts/quickstart_summaries.sh"
