#!/usr/bin/env bash
# Responses of several turns: a small Llama from scratch imitates players who guess at random, and P3O teaches it to find
# a hexadecimal digit in four guesses, from what the environment answers. Bisection, the best there is, finds 15 of 16.
# Run again, it goes on where it stopped.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
source scripts/stage.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

SEED="${FASTP3O_SEED:-0}"
OBJECTIVE="${FASTP3O_OBJECTIVE:-p3o}"
RUN="${FASTP3O_RUN:-runs/game}"
TRAINED="$RUN/$OBJECTIVE-$SEED"

if [[ ! -f "$RUN/init/done" ]]; then
    echo "== Data and model: games of random play, and an untrained Llama"
    "$PYTHON" scripts/make_game.py --output_dir "$RUN" --plays 16000
    "$PYTHON" scripts/make_tiny_llama.py --text "$RUN/plays.jsonl" --output_dir "$RUN/init" --vocab_size 258 \
        --hidden_size 64 --intermediate_size 192 --layers 3 --max_tokens 48
    touch "$RUN/init/done"
fi

shared=(--max_prompt_tokens 16 --max_response_tokens 17 --tokens_per_row 4096)
stage "Stage 1: supervised fine-tuning, on games of random play" sft "$RUN/sft" "${shared[@]}" \
    --model "$RUN/init" --train_data "$RUN/plays.jsonl" --epochs 3 --batch_size 64 --learning_rate 3e-3 \
    --lr_schedule cosine --warmup_steps 10
# The best of four rates for each objective, by success after 80 updates with another seed.
case "$OBJECTIVE" in
    p3o) rates=(--learning_rate 1e-3) ;;
    ppo) rates=(--learning_rate 3e-3 --critic_learning_rate 3e-3) ;;
    rloo) rates=(--learning_rate 3e-4) ;;
    *) rates=(--learning_rate 3e-3) ;;
esac
stage "Stage 2: $OBJECTIVE, from what the environment gives for each turn of eight games to a start" online "$TRAINED" \
    --objective "$OBJECTIVE" --seed "$SEED" "${shared[@]}" --model "$RUN/sft/model" \
    --environment make_game:Guess --reward environment --stop_strings '["\n"]' --max_turns 4 --max_turn_tokens 3 \
    --prompts "$RUN/starts.jsonl" --eval_prompts "$RUN/new_starts.jsonl" --eval_every 40 --eval_responses_per_prompt 8 \
    --eval_greedy --updates "${FASTP3O_UPDATES:-160}" --prompts_per_update 32 --prompts_per_minibatch 16 \
    --responses_per_prompt 8 --inner_epochs 1 --kl_coef 0 --warmup_steps 8 --samples_every 0 "${rates[@]}"

echo "== Result: share of digits that are found (reward/found) in ranges that were not trained on"
"$PYTHON" -c "
import json, sys
for line in map(json.loads, open(sys.argv[1])):
    print(f\"after update {line['step']:>3}: {line['reward/found']:.3f}, by the likeliest guesses {line['greedy/reward/found']:.3f}\")
" "$TRAINED/eval.jsonl"
echo "== Games of the last update, the best and the worst"
"$PYTHON" -m fastp3o rollouts "$TRAINED"
