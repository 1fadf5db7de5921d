# Sourced by human_preferences.sh and film_reviews.sh, which set $RUN: what they share, from a real pretrained model to a
# policy that follows a reward model. FASTP3O_REAL_MODEL=google/gemma-3-270m, or any causal LM, takes another model.
source scripts/stage.sh
source scripts/real_model.sh

SEED="${FASTP3O_SEED:-0}" # of the data and of every stage
DATA="$RUN/data"

# All that a machine's size decides; a CPU needs 5 GB of memory. FASTP3O_LONG=1 takes the sizes of the record and the study.
round=(--prompts_per_update 4 --prompts_per_minibatch 2)
# bfloat16 saves policies no time on a CPU, and rounds log-ratios by as much as an update moves them.
memory=(--tokens_per_row 1024 --precision fp32)
if "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    size=gpu updates=100 evaluated_every=20 evaluated_responses=4 judged_responses=2 response_tokens=64
    round=(--prompts_per_update 32 --prompts_per_minibatch 16)
    memory=(--tokens_per_row 8192)
elif [[ -n "${FASTP3O_LONG:-}" ]]; then
    size=long updates=16 evaluated_every=8 evaluated_responses=4 judged_responses=2 response_tokens=24
else
    size=short updates=8 evaluated_every=8 evaluated_responses=2 judged_responses=1 response_tokens=24
fi
shared=(--seed "$SEED" "${memory[@]}")

fine_tune() { # fine_tune <title> <flags...>: stage 1, from the pretrained model
    local title="$1"
    shift
    stage "Stage 1: $title" sft "$RUN/sft" "${shared[@]}" --model "$FASTP3O_REAL_MODEL" \
        --train_data "$DATA/sft.jsonl" --lora_rank 16 --batch_size 8 --learning_rate 5e-4 "$@"
}

reward_model() { # reward_model <name> <title> <flags...>: stage 2, from the pairs of $DATA/<name>.jsonl
    local name="$1" title="$2"
    shift 2
    stage "Stage 2: $title" reward "$RUN/$name" "${shared[@]}" --model "$RUN/sft/model" \
        --train_data "$DATA/$name.jsonl" --eval_data "$DATA/held_out.jsonl" --batch_size 16 "$@"
}

policy() { # policy <title> <gold> <prompts of evaluations> <flags...>: stage 3, P3O on the reward model
    local title="$1" gold="$2" prompts="$3"
    shift 3
    stage "Stage 3: $title" p3o "$RUN/p3o" "${shared[@]}" "${round[@]}" --lora_rank 16 --model "$RUN/sft/model" \
        --reward "$RUN/reward/model" --gold_reward "$gold" --prompts "$DATA/sft.jsonl" --eval_prompts "$prompts" \
        --eval_limit 32 --eval_every "$evaluated_every" --eval_responses_per_prompt "$evaluated_responses" \
        --responses_per_prompt 4 --inner_epochs 1 --updates "$updates" --samples_every "$updates" "$@"
}

judged() { # judged <gold> <prompts> <flags...>: how often the gold prefers a response after P3O to one before
    local gold="$1" prompts="$2"
    shift 2
    "$PYTHON" -m fastp3o win_rate --models "$RUN/sft/model,$RUN/p3o/model" --reward "$gold" --prompts "$prompts" \
        --responses_per_prompt "$judged_responses" --seed "$SEED" --output "$RUN/win_rate.json" "$@"
    grep '^after' "$RUN/logs/p3o.txt"
}
