#!/usr/bin/env bash
# From a real pretrained model and real people's comparisons to P3O: Gemma 3 270M (under the Gemma terms of use,
# https://ai.google.dev/gemma/terms) learns from Anthropic's comparisons of harmlessness. A second reward model, which
# learned from other comparisons, judges what the policy gained. Run again, it goes on where it stopped.
# FASTP3O_HH=FILE takes a copy of the comparisons; scripts/real_task.sh has the sizes, and further variables.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
RUN="${FASTP3O_RUN:-runs/human_preferences}"
source scripts/real_task.sh

case "$size" in
    gpu) comparisons=416 rewarding=(--epochs 2 --lora_rank 16 --learning_rate 2e-4) ;;
    long) comparisons=416 rewarding=(--epochs 1 --lora_rank 16 --learning_rate 2e-4) ;;
    # The shortest comparisons, and no gradient goes below the top layers: most of the time went into reward models.
    short) comparisons=208 rewarding=(--epochs 1 --trainable_layers 4 --learning_rate 5e-5) ;;
esac

if [[ ! -f "$DATA/done" ]]; then
    echo "== Data: people's choices between two answers of an assistant"
    "$PYTHON" scripts/make_human_preferences.py --output_dir "$DATA" --seed "$SEED" --comparisons "$comparisons" \
        ${FASTP3O_HH:+--file "$FASTP3O_HH"}
    touch "$DATA/done"
fi

reading=(--max_prompt_tokens 224 --max_response_tokens 96)
fine_tune "supervised fine-tuning on chosen answers" "${reading[@]}"
for name in reward judge; do
    reward_model "$name" "the ${name} model, from its $comparisons comparisons" "${reading[@]}" "${rewarding[@]}"
done
# The base model writes the next question after its answer.
answers=(--max_prompt_tokens 96 --max_response_tokens "$response_tokens" --stop_strings '["\n\nHuman:"]')
policy "P3O, from four answers to each prompt and the differences of their rewards" \
    "$RUN/judge/model" "$DATA/held_out.jsonl" "${answers[@]}"

echo "== Result: how often the judge prefers an answer after P3O to one before, on prompts that no stage has seen"
judged "$RUN/judge/model" "$DATA/held_out.jsonl" "${answers[@]}"
grep -h '^after' "$RUN"/logs/{reward,judge}.txt | sed 's/^/reward models: /'
echo "Rewards of a small model of human taste are soon exploited: look at fastp3o rollouts $RUN/p3o before you believe them"
