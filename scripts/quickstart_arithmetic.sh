#!/usr/bin/env bash
# A task whose reward is known: sums, a small Llama from scratch that learns them from demonstrations of two forms, and
# P3O with a reward function that reads each prompt's answer and takes one of the forms. Run again, it goes on where it
# stopped.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
source scripts/stage.sh

RUN="${FASTP3O_RUN:-runs/arithmetic}"
SUMS="$RUN/sums.jsonl"

if [[ ! -f "$RUN/init/done" ]]; then
    echo "== Data and model: sums of two digits, half of the answers with a full stop, and an untrained Llama"
    "$PYTHON" scripts/make_arithmetic.py --output "$SUMS"
    # A vocabulary of letters alone: nothing is merged.
    "$PYTHON" scripts/make_tiny_llama.py --text "$SUMS" --output_dir "$RUN/init" --vocab_size 258 --layers 2 --max_tokens 32
    touch "$RUN/init/done"
fi

shared=(--max_prompt_tokens 8 --max_response_tokens 4 --tokens_per_row 2048)
stage "Stage 1: supervised fine-tuning, on both forms" sft "$RUN/sft" "${shared[@]}" --model "$RUN/init" \
    --train_data "$SUMS" --eval_data "$SUMS" --epochs 30 --batch_size 20 \
    --learning_rate 2e-3 --lr_schedule cosine --warmup_steps 10
stage "Stage 2: P3O, from four answers to each sum, rewarded where they are the number alone" p3o "$RUN/p3o" \
    "${shared[@]}" --model "$RUN/sft/model" --reward fastp3o.rewards.verifiable:exact_match \
    --prompts "$SUMS" --eval_prompts "$SUMS" --eval_batch_size 200 --eval_every 5 \
    --updates 20 --prompts_per_update 64 --prompts_per_minibatch 32 --responses_per_prompt 4 --inner_epochs 2 \
    --learning_rate 2e-4 --warmup_steps 8 --kl_coef 0.02 --samples_every 20

echo "== Result: share of answers that are the number alone (reward), and KL"
"$PYTHON" -m fastp3o frontier "$RUN/p3o" --output "$RUN/frontier.png"
