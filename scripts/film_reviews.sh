#!/usr/bin/env bash
# A second task on a real pretrained model, where a short refusal gains nothing: Gemma 3 270M (under the Gemma terms of
# use, https://ai.google.dev/gemma/terms) goes on with beginnings of film reviews, and is rewarded for positive ones. The
# reward model learned from labels of reviews (Pang and Lee, 2005); a regression on the words of other reviews judges what
# the policy gained. Run again, it goes on where it stopped.
# FASTP3O_REVIEWS=FOLDER takes copies of the reviews; scripts/real_task.sh has the sizes, and further variables.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
RUN="${FASTP3O_RUN:-runs/film_reviews}"
source scripts/real_task.sh

# On a CPU no gradient goes below the top layers: most of the time would go into the reward model.
pairs=512 rewarding=(--trainable_layers 4 --learning_rate 5e-5)
if [[ "$size" == gpu ]]; then
    pairs=2537 rewarding=(--lora_rank 16 --learning_rate 2e-4) # all pairs that there are
fi

if [[ ! -f "$DATA/done" ]]; then
    echo "== Data: sentences of film reviews, positive and negative ones"
    "$PYTHON" scripts/make_film_reviews.py --output_dir "$DATA" --seed "$SEED" \
        ${FASTP3O_REVIEWS:+--folder "$FASTP3O_REVIEWS"}
    touch "$DATA/done"
fi
export FASTP3O_POLARITY="$RUN/polarity.json"
if [[ ! -f "$FASTP3O_POLARITY" ]]; then
    echo "== The gold: a regression on words and pairs of neighbors, which no stage sees"
    "$PYTHON" scripts/polarity.py --train_data "$DATA/gold.jsonl" --eval_data "$DATA/held_out.jsonl" \
        --output "$FASTP3O_POLARITY"
fi

reading=(--max_prompt_tokens 96 --max_response_tokens 96)
fine_tune "supervised fine-tuning on sentences, which are to end" "${reading[@]}"
reward_model reward "the reward model, from $pairs pairs of a positive and a negative sentence" "${reading[@]}" \
    --limit "$pairs" "${rewarding[@]}"
sentences=(--max_prompt_tokens 96 --max_response_tokens "$response_tokens")
policy "P3O, from four endings of each sentence and the differences of their rewards" \
    polarity:polarity "$DATA/prompts.jsonl" "${sentences[@]}"

echo "== Result: how often the gold prefers a sentence after P3O to one before, from beginnings that no stage has seen"
judged polarity:polarity "$DATA/prompts.jsonl" --limit 96 "${sentences[@]}"
grep -h '^after' "$RUN/logs/reward.txt" | sed 's/^/reward model: /'
echo "Praise is cheap: fastp3o rollouts $RUN/p3o shows what the policy praises, and whether it still says anything"
