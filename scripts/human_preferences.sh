#!/usr/bin/env bash
# From a real pretrained model and real people's comparisons to P3O: Gemma 3 270M (under the Gemma terms of use,
# https://ai.google.dev/gemma/terms) learns from Anthropic's comparisons of harmlessness. A second reward model, which
# learned from other comparisons, judges what the policy gained. Run again, it goes on where it stopped.
# FASTP3O_REAL_MODEL=google/gemma-3-270m, or any causal LM, takes another model; FASTP3O_HH=FILE a copy of the comparisons.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
source scripts/stage.sh
source scripts/real_model.sh

SEED="${FASTP3O_SEED:-0}" # of the data and of every stage
RUN="${FASTP3O_RUN:-runs/human_preferences}"
DATA="$RUN/data"

# All that a machine's size decides; a CPU needs 5 GB of memory. FASTP3O_LONG=1 takes the sizes of the record and the study.
round=(--prompts_per_update 4 --prompts_per_minibatch 2)
# bfloat16 saves policies no time on a CPU, and rounds log-ratios by as much as an update moves them.
memory=(--tokens_per_row 1024 --precision fp32)
if "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    comparisons=416 updates=100 evaluated_every=20 evaluated_responses=4 judged_responses=2 response_tokens=64
    rewarding=(--epochs 2 --batch_size 16 --lora_rank 16 --learning_rate 2e-4)
    round=(--prompts_per_update 32 --prompts_per_minibatch 16)
    memory=(--tokens_per_row 8192)
elif [[ -n "${FASTP3O_LONG:-}" ]]; then
    comparisons=416 updates=16 evaluated_every=8 evaluated_responses=4 judged_responses=2 response_tokens=24
    rewarding=(--epochs 1 --batch_size 16 --lora_rank 16 --learning_rate 2e-4)
else
    comparisons=208 updates=8 evaluated_every=8 evaluated_responses=2 judged_responses=1 response_tokens=24
    # The shortest comparisons, and no gradient goes below the top layers: most of the time went into reward models.
    rewarding=(--epochs 1 --batch_size 16 --trainable_layers 4 --learning_rate 5e-5)
fi

if [[ ! -f "$DATA/done" ]]; then
    echo "== Data: people's choices between two answers of an assistant"
    "$PYTHON" scripts/make_human_preferences.py --output_dir "$DATA" --seed "$SEED" --comparisons "$comparisons" \
        ${FASTP3O_HH:+--file "$FASTP3O_HH"}
    touch "$DATA/done"
fi

shared=(--seed "$SEED" "${memory[@]}")
reading=(--max_prompt_tokens 224 --max_response_tokens 96)
stage "Stage 1: supervised fine-tuning on chosen answers" sft "$RUN/sft" "${shared[@]}" "${reading[@]}" \
    --model "$FASTP3O_REAL_MODEL" --train_data "$DATA/sft.jsonl" --lora_rank 16 --batch_size 8 --learning_rate 5e-4
for name in reward judge; do
    stage "Stage 2: the ${name} model, from its $comparisons comparisons" reward "$RUN/$name" \
        "${shared[@]}" "${reading[@]}" "${rewarding[@]}" --model "$RUN/sft/model" --train_data "$DATA/$name.jsonl" \
        --eval_data "$DATA/held_out.jsonl"
done
# The base model writes the next question after its answer.
answers=(--max_prompt_tokens 96 --max_response_tokens "$response_tokens" --stop_strings '["\n\nHuman:"]')
stage "Stage 3: P3O, from four answers to each prompt and the differences of their rewards" p3o "$RUN/p3o" \
    "${shared[@]}" "${answers[@]}" "${round[@]}" --lora_rank 16 --model "$RUN/sft/model" --reward "$RUN/reward/model" \
    --prompts "$DATA/sft.jsonl" --eval_prompts "$DATA/held_out.jsonl" --eval_limit 32 --eval_every "$evaluated_every" \
    --gold_reward "$RUN/judge/model" --eval_responses_per_prompt "$evaluated_responses" --responses_per_prompt 4 \
    --inner_epochs 1 --updates "$updates" --samples_every "$updates"

echo "== Result: how often the judge prefers an answer after P3O to one before, on prompts that no stage has seen"
"$PYTHON" -m fastp3o win_rate --models "$RUN/sft/model,$RUN/p3o/model" --reward "$RUN/judge/model" \
    --prompts "$DATA/held_out.jsonl" "${answers[@]}" --responses_per_prompt "$judged_responses" --seed "$SEED" \
    --output "$RUN/win_rate.json"
grep -h '^after' "$RUN"/logs/{reward,judge}.txt | sed 's/^/reward models: /'
grep '^after' "$RUN/logs/p3o.txt"
echo "Rewards of a small model of human taste are soon exploited: read $RUN/p3o/samples.jsonl before you believe them"
