#!/usr/bin/env bash
# RLHF on real text, and how a small reward model is exploited: a summarization set from the docstrings of this
# machine's Python, a small Llama from scratch, SFT, a reward model, P3O, a plot. Run again, it goes on where it stopped.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
source scripts/stage.sh

RUN="${FASTP3O_RUN:-runs/summaries}"
DATA="$RUN/data"

if [[ ! -f "$DATA/done" ]]; then
    echo "== Data: docstrings of the installed packages as posts, their first lines as summaries"
    mkdir -p "$DATA"
    "$PYTHON" scripts/make_docstring_tldr.py --output_dir "$DATA" > "$DATA/sources.txt"
    head -n 1 "$DATA/sources.txt"
    touch "$DATA/done"
fi
if [[ ! -f "$RUN/init/done" ]]; then
    echo "== Model: a tokenizer trained on them, and an untrained Llama"
    "$PYTHON" scripts/make_tiny_llama.py --text "$DATA/sft.train.jsonl" --output_dir "$RUN/init"
    touch "$RUN/init/done"
fi

lengths=(--max_prompt_tokens 192 --tokens_per_row 2048)
stage "Stage 1: supervised fine-tuning, on prompts too: the model knows no language yet" sft "$RUN/sft" \
    "${lengths[@]}" --max_response_tokens 64 --model "$RUN/init" --train_data "$DATA/sft.train.jsonl" \
    --eval_data "$DATA/sft.eval.jsonl" --eval_limit 64 --train_on_prompt --limit 4096 \
    --batch_size 64 --learning_rate 4e-3 --lr_schedule cosine --warmup_steps 5
stage "Stage 2: reward model, from true summaries beside wrong and damaged ones" reward "$RUN/reward_model" \
    "${lengths[@]}" --max_response_tokens 128 --model "$RUN/sft/model" --train_data "$DATA/preferences.train.jsonl" \
    --eval_data "$DATA/preferences.eval.jsonl" --eval_limit 128 --limit 2560 --batch_size 32 \
    --learning_rate 1e-3 --lr_schedule cosine --warmup_steps 5
stage "Stage 3: P3O, from two summaries of each post and the difference of their rewards" p3o "$RUN/p3o" \
    "${lengths[@]}" --model "$RUN/sft/model" --reward "$RUN/reward_model/model" \
    --prompts "$DATA/prompts.train.jsonl" --eval_prompts "$DATA/sft.eval.jsonl" --eval_limit 128 --eval_every 5 \
    --gold_reward fastp3o.rewards.verifiable:word_overlap --eval_responses_per_prompt 4 \
    --updates 10 --prompts_per_update 32 --prompts_per_minibatch 16 --inner_epochs 2 \
    --max_response_tokens 32 --missing_eos_penalty 1 --learning_rate 3e-4 --kl_coef 0.05 --samples_every 10

echo "== Result: reward and KL on prompts of modules that no stage was trained on"
"$PYTHON" -m fastp3o frontier "$RUN/p3o" --output "$RUN/frontier.png"
echo "== The same as the stage has printed it. gold is the overlap with the true summaries (ROUGE-1), which no stage sees:"
grep '^after step' "$RUN/logs/p3o.txt"
echo "A gold that falls while the reward rises means that the reward model is exploited: see scripts/README.md"
