"""Mistakes that users can make, each with the line that they must read.

A case adds flags to a run that would work, writes files into its folder first, and ends in
`message`: an error of its own, or one line under argparse's usage. Folders under `models/` are
those of `conftest.py`. The bounds, choices and needs of single flags are in test_flags.py.
"""

import json
from typing import NamedTuple


class Case(NamedTuple):
    """files: what is written first, by name. message: what the one line must hold."""

    script: str
    flags: str
    message: str
    files: dict[str, str | bytes] = {}  # noqa: RUF012


TWO = "rewards_for_tests:varied,rewards_for_tests:vowels"
AWAY = "--reward http://127.0.0.1:1/score"
FLAGS = [
    # Values that argparse refuses, and names.
    ("p3o", "--learning_rate fast", "--learning_rate: invalid float value: 'fast'"),
    ("p3o", "--lr_schedule greedy", "--lr_schedule: invalid choice: 'greedy' (choose from "),
    ("p3o", "--offload maybe", "argument --offload: expected yes or no"),
    (
        "p3o",
        "--output_dir ' '",
        "--output_dir must not be empty or contain null bytes or unpaired surrogates, got ' '",
    ),
    (
        "p3o",
        "--chat_template_kwargs [1]",
        "--chat_template_kwargs must be a JSON object, got '[1]'",
    ),
    ("p3o", "--resume no more", "unexpected argument 'more'"),
    *[
        (name, "--attention fa3", "--attention fa3 needs a GPU")
        for name in ("p3o", "generate", "win_rate")
    ],
    # Rewards.
    ("p3o", "--reward_requests 3", "--reward_requests has no effect without a URL as a reward"),
    (
        "preference",
        "--eval_prompts p --reward_timeout 9",
        "--reward_timeout has no effect without a URL or a function",
    ),
    (
        "preference",
        "--eval_prompts p --gold_reward r",
        "--gold_reward has no effect without --reward",
    ),
    ("p3o", "--reward_columns a,a", "--reward_columns must be different names"),
    (
        "p3o",
        "--reward_columns responses",
        "--reward_columns must be other than prompts and responses",
    ),
    *[
        (
            "p3o",
            f"--reward {TWO} --reward_weights={weights}",
            "--reward_weights must be 2 finite numbers, as many as",
        )
        for weights in ("1", "1,nan", "1,", "0,0")
    ],
    ("p3o", f"--reward {TWO},", "--reward must be comma-separated names, none of them empty"),
    ("p3o", f"--reward {TWO},rewards_for_tests:varied", "--reward must be different names"),
    # Several flags.
    (
        "p3o",
        "--prompts_per_minibatch 3",
        "--prompts_per_update (4) must be a multiple of --prompts_per_minibatch (3)",
    ),
    ("p3o", "--eval_prompts p --eval_at=-1", "--eval_at must be comma-separated whole numbers"),
    ("p3o", "--eval_prompts p --eval_at 1,2", "--eval_at must be updates of the run, at most 1"),
    ("p3o", "--sampler vllm", "--sampler vllm needs --vllm_url, the servers that sample"),
    ("p3o", "--vllm_weights nccl", "--vllm_weights has no effect without --vllm_url"),
    (
        "p3o",
        "--rounds_ahead 1 --interrupt_rollouts",
        "--interrupt_rollouts has no effect without --sampler vllm",
    ),
    ("p3o", "--sampler_ratio_cap 0.5", "--sampler_ratio_cap must be 0 or at least 1, got 0.5"),
    (
        "p3o",
        "--sampler_ratio_cap 2 --sampler transformers",
        "--sampler_ratio_cap needs log-probs of the sampler",
    ),
    (
        "p3o",
        "--old_logprobs sampler --sampler transformers",
        "--old_logprobs sampler needs log-probs of the sampler",
    ),
    (
        "p3o",
        "--sampler_ratio_cap 2 --old_logprobs sampler",
        "cannot be combined: both correct the same",
    ),
    ("online", "--old_logprobs sampler", "--old_logprobs sampler changes no ratio"),
    (
        "p3o",
        "--clipping none --clip_range 0.1",
        "--clip_range has no effect without --clipping joint or --clipping sep",
    ),
    (
        "online",
        "--clip_low 0.1",
        "--clip_low has no effect without --clipping response or --clipping token",
    ),
    (
        "online",
        "--clipping token --lora_rank 2 --lora_dropout 0.1",
        "--lora_dropout would make ratios random",
    ),
    (
        "p3o",
        "--deterministic --top_p 0.9 --sampler_ratio_cap 2",
        "--deterministic and --top_p cannot be combined",
    ),
    (
        "p3o",
        "--lora_rank 2 --trainable_layers 1",
        "--trainable_layers and --lora_rank cannot be combined",
    ),
    (
        "sft",
        "--lora_rank 2 --lora_dropout 0.1 --compile_layers",
        "--lora_dropout and --compile_layers cannot be combined",
    ),
    (
        "sft",
        "--lora_rank 2 --quantize 4bit --compile_layers",
        "--quantize and --compile_layers cannot be combined",
    ),
    (
        "online",
        "--objective ppg --inner_epochs 2",
        "--inner_epochs must be 1, got 2: the gradient is on-policy",
    ),
    (
        "online",
        "--objective ppg --prompts_per_minibatch 2",
        "--prompts_per_minibatch must be 4, got 2",
    ),
    (
        "online",
        "--objective ppg --clip_range 0.1 --ratio_cap 2",
        "be 0.2, got 0.1; --ratio_cap must be 10.0, got 2.0",
    ),
    ("online", "--objective ppg --kl_reward rollout", "--kl_reward must be current, got rollout"),
    (
        "online",
        "--objective ppg --old_logprobs sampler",
        "--old_logprobs must be policy, got sampler",
    ),
    (
        "online",
        "--objective dapo --kl_estimator k2",
        "--kl_estimator has no effect without --kl_coef",
    ),
    ("online", "--objective copg --kl_coef 0", "--kl_coef must be above 0"),
    (
        "online",
        "--objective copg --old_logprobs sampler",
        "--old_logprobs sampler changes no ratio",
    ),
    (
        "online",
        "--objective oapl --sampler_ratio_cap 2",
        "cannot be combined: both correct the same",
    ),
    ("online", "--target_kl 1 --kl_coef 0", "--target_kl adapts --kl_coef, which must be above 0"),
    (
        "online",
        "--reference_every 1 --reference_decay 0.5",
        "--reference_every and --reference_decay cannot be combined",
    ),
    (
        "online",
        "--reference_every 1 --lora_rank 2",
        "--reference_every and --reference_decay need whole weights",
    ),
    *[
        ("online", f"--objective nash_md --{flags}", message)
        for flags, message in {
            "responses_per_prompt 3": "--responses_per_prompt must be even: half are the mixture's",
            "top_p 0.9": "exclude a mixture",
            "old_logprobs sampler": "needs log-probs of the sampler, and responses of --mixture have none",
            "lora_rank 2": "--mixture samples from a reference of its own",
            "offload": "--mixture and --offload cannot be combined",
            "sampler transformers": "--mixture needs --sampler engine",
        }.items()
    ],
    (
        "preference",
        "--objective simpo --reference models/whole",
        "--reference has no effect without --eval_prompts or an --objective with a reference",
    ),
    ("generate", "--keep rso --accept 1", "--accept must be at least 2"),
    ("generate", "--keep rso --accept 8", "--accept (8) must be below --responses_per_prompt (8)"),
    (
        "generate",
        "--keep rs_dpo --responses_per_prompt 1",
        "--responses_per_prompt must be at least 2",
    ),
    (
        "memory",
        "--lora_rank 2 --quantize 4bit",
        "--quantize: the memory of quantized bases is not predicted",
    ),
    ("make_tiny_llama", "--heads 3", "--hidden_size must be an even multiple of --heads"),
]
YAML = [
    ("modle: m\n", "unknown option in run.yaml: modle"),
    ("updates: 1\nseed: 1\nupdates: 2\n", "run.yaml gives more than one value for updates"),
    ("updates: [1]\n", "run.yaml must give a single value for updates, not a list"),
    ("updates:\n", "run.yaml gives no value for updates"),
    ("", "run.yaml must hold one `field: value` a line"),
    ("updates: [\n", "cannot read run.yaml"),
    (b"model: \xff\xfe\n", "cannot read run.yaml"),
]
# What a run refuses when it uses it.
USES = [
    (
        "p3o",
        "--reward_columns answer",
        "expected a value, which --reward_columns asks for, got nothing",
    ),
    (
        "p3o",
        f"{AWAY} --reward_retries 0",
        "http://127.0.0.1:1/score does not answer: ConnectionRefusedError",
    ),
    (
        "p3o",
        f"--eval_prompts prompts.jsonl --gold_{AWAY[2:]} --reward_retries 0",
        "http://127.0.0.1:1/score does not",
    ),
    (
        "win_rate",
        "--judge_url ftp://a --judge_model m",
        "the endpoint must be a URL such as http://localhost:8000/v1",
    ),
    ("win_rate", "--judge_url http://me:secret@a/v1 --judge_model m", "without user, got 'a/v1'"),
    ("p3o", "--reward http://me:secret@a/score", "without user, got 'a/score'"),
    (
        "p3o",
        "--sampler vllm --vllm_url http://me:secret@a:8000",
        "without user, got 'a:8000/version'",
    ),
    ("generate", "--reward https://a/score?key=secret", "without user, got 'https://a/score'"),
    (
        "p3o",
        "--lora_rank 100000",
        "--lora_rank is 100000, and the model's matrices have a rank of 32 at most",
    ),
    ("reward", "--lora_rank 2 --lora_targets score", "leave it out of --lora_targets"),
    ("p3o", "--report_to nosuch", "unknown tracker nosuch in --report_to; available: "),
    ("p3o", "--report_to comet_ml", "--report_to: comet_ml is not installed: pip install comet_ml"),
    ("p3o", "--warmup_steps 100", "--warmup_steps is 100, and the run has 4 optimizer steps"),
    (
        "p3o",
        "--eval_prompts prompts.jsonl --eval_split test",
        "prompts.jsonl: there is no split 'test'",
    ),
    (
        "online",
        "--ptx_data prompts.jsonl",
        "prompts.jsonl record 1: expected the fields of one of the layouts",
    ),
    (
        "preference",
        "--train_data unpaired.jsonl",
        "record 1: expected the fields of one of the layouts prompt/chosen/",
    ),
    (
        "preference",
        "--objective kto --train_data sft.jsonl",
        "the fields of the layout prompt/completion/label",
    ),
    ("generate", "--output_dir prompts.jsonl", "--output_dir prompts.jsonl is a file"),
    ("generate", "--output_dir models", "--model models/whole lies in --output_dir models"),
    # Models.
    (
        "p3o",
        "--model models/not_finite",
        "NaN or infinite in torch.float32: model.embed_tokens.weight",
    ),
    (
        "p3o",
        "--model models/int8",
        "int8/model.safetensors has model.norm.weight in I8; quantized weights are not",
    ),
    (
        "p3o",
        "--model models/rope",
        "cannot load models/rope: its JSON files lack 'nosuch', or name it",
    ),
    (
        "p3o",
        "--model models/list_config",
        "models/list_config/config.json must hold a JSON object, got a list",
    ),
    ("p3o", "--model models/adapter_of_nothing", "its adapter_config.json names no base model"),
    (
        "p3o",
        "--model models/adapter_of_no_folder",
        "names the base model runs/no/model, and there is no such folder",
    ),
    *[
        ("p3o", f"--model models/{name}", f"models/{name}")
        for name in ("cut_config", "cut_tokenizer")
    ],
    (
        "p3o",
        "--model prompts.jsonl",
        "cannot load prompts.jsonl: it is a file, and models are folders",
    ),
    (
        "p3o",
        "--model models/gguf/weights.gguf",
        "GGUF files hold rounded weights for inference. To train from one, install",
    ),
    (
        "p3o",
        "--model models/gguf",
        "AutoTokenizer.from_pretrained('models/gguf', gguf_file='weights.gguf').save_pre",
    ),
    (
        "p3o",
        "--reference models/permuted",
        "that of models/permuted is not that of models/whole: 2 tokens have",
    ),
    (
        "p3o",
        "--reward models/reward_short",
        "LlamaForSequenceClassification (models/reward_short) end at 16",
    ),
    (
        "p3o",
        "--gold_reward models/whole --eval_prompts prompts.jsonl",
        "models/whole is not a trained reward model",
    ),
]
SAME = "".join(
    json.dumps({"prompt": "a", "completion": "b", "label": label}) + "\n" for label in (True, False)
)
REWARDS = """
import asyncio, os
def numbers(prompts, responses): return [1.0] * len(responses)
def not_finite(prompts, responses): return [float("nan")] * len(responses)
def answered(prompts, responses, answer): return [1.0] * len(responses)
def elsewhere(prompts, responses): os.chdir("/"); return [float("nan")] * len(responses)
async def slow(prompts, responses): await asyncio.sleep(60)
"""
REWARD_FUNCTIONS = [
    ("not_finite", "a reward is NaN or infinite (8 values)", REWARDS),
    ("elsewhere", "nothing was trained before that", REWARDS),
    (
        "slow --reward_timeout 0.5",
        "bad_rewards:slow has not returned after 0.5 s (--reward_timeout)",
        REWARDS,
    ),
    (
        "numbers --eval_prompts prompts.jsonl --gold_reward bad_rewards:answered",
        "prompts.jsonl record 1 field 'answer': expected a value, which the reward function bad_rewards:answered asks",
        REWARDS,
    ),
    (
        "f",
        "cannot load the reward function 'bad_rewards:f': ZeroDivisionError: division by zero",
        "1 / 0",
    ),
    (
        "f",
        "cannot load the reward function 'bad_rewards:f': SystemExit: 0",
        "import sys; sys.exit(0)",
    ),
]
CASES = [
    *(Case(*case) for case in (*FLAGS, *USES)),
    *(Case("p3o", "run.yaml", message, {"run.yaml": content}) for content, message in YAML),
    Case(
        "preference",
        "run.yaml",
        "must give a single value for objective",
        {"run.yaml": "objective: [dpo]\n"},
    ),
    Case(
        "preference",
        "--objective kto --train_data same.jsonl",
        "KTO needs two different",
        {"same.jsonl": SAME},
    ),
    *(
        Case("p3o", f"--reward bad_rewards:{name}", message, {"bad_rewards.py": module})
        for name, message, module in REWARD_FUNCTIONS
    ),
]
