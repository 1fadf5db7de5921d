"""Mistakes that users can make, each with the line that they must read.

A case adds flags to a run that would work, writes files into its folder first, and ends in `message`: an error of its
own, or one line under argparse's usage. Folders under `models/` are those of `broken_models.py`. CONFIGURED are the
cases that a configuration refuses; of each kind a few run a whole script.
"""

import gzip
import json
from typing import NamedTuple

SCRIPTS = ("ppo", "online_dpo", "online", "sft", "reward_model", "preference", "win_rate", "generate", "memory")


class Case(NamedTuple):
    """files: what is written first, by name. message: what the one line must hold."""

    script: str
    flags: str
    message: str
    files: dict[str, str | bytes] = {}  # noqa: RUF012


def lines(*records: object) -> str:
    """JSON Lines; strings are lines as they are."""
    return "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)


# --- flags that a configuration refuses -----------------------------------------------------------------------------

TWO = "rewards_for_tests:varied,rewards_for_tests:vowels"
AWAY = "--reward http://127.0.0.1:1/score"
FLAGS = [
    # The bounds, choices and needs of single flags are in test_flags.py: here is one of each kind.
    ("p3o", "--learning_rate=0", "--learning_rate must be above 0"),
    ("p3o", "--clip_range nan", "--clip_range must be a finite number"),
    ("p3o", "--lora_alpha 8", "--lora_alpha does nothing without --lora_rank"),
    ("ppo", "--gae_lambda 2", "--gae_lambda must be within 0 and 1"),
    ("online_dpo", "--kl_coef 0", "--kl_coef must be above 0"),
    ("sft", "--batch_size 0", "--batch_size must be at least 1"),
    ("reward_model", "--centring -1", "--centring must be 0 or more"),
    ("memory", "--prompt_tokens 0", "--prompt_tokens must be at least 1"),
    *[
        (script, "--reward_requests 3", "--reward_requests does nothing without a URL as a reward")
        for script in ("p3o", "win_rate")
    ],
    ("p3o", "--reward models/reward --reward_timeout 9", "--reward_timeout does nothing without a URL or a function"),
    ("p3o", "--reward_columns a,,b", "--reward_columns must be different names"),
    ("p3o", "--reward_columns a,a", "--reward_columns must be different names"),
    ("p3o", "--reward_columns responses", "--reward_columns must be other names than prompts and responses"),
    ("p3o", "--length_penalty 1 --length_penalty_after 8", "must be below --max_response_tokens (8), got 8"),
    ("p3o", "--overlong_margin 9", "--overlong_margin must be at most --max_response_tokens (8), got 9"),
    *[
        ("p3o", f"--reward {TWO} --reward_weights={weights}", "--reward_weights must be 2 finite numbers, as many as")
        for weights in ("1", "1,2,3", "1,nan", "1,inf", "1,", "1\\;2", "0,0", "a,b")
    ],
    ("p3o", "--reward_weights 1,2", "--reward_weights must be 1 finite number, as many as there are rewards"),
    ("p3o", f"--reward {TWO},", "--reward must be names separated by commas, none of them empty"),
    ("p3o", f"--reward {TWO},rewards_for_tests:varied", "--reward must be different names"),
    ("p3o", "--learning_rate fast", "--learning_rate: invalid float value: 'fast'"),
    ("p3o", "--learning_rate -1e-5", "--learning_rate: expected one argument"),
    *[("p3o", f"--{name} 1.5", "invalid int value: '1.5'") for name in ("updates", "seed", "warmup_steps")],
    ("p3o", "--prompts_per_minibatch 3", "--prompts_per_update (4) must be a multiple of --prompts_per_minibatch (3)"),
    ("p3o", "--lr_schedule greedy", "--lr_schedule: invalid choice: 'greedy' (choose from "),
    ("p3o", "--eval_prompts prompts.jsonl --eval_at 1,two", "--eval_at must be whole numbers separated by commas"),
    ("p3o", "--eval_prompts prompts.jsonl --eval_at=-1", "--eval_at must be whole numbers separated by commas"),
    ("p3o", "--eval_prompts prompts.jsonl --eval_at 1,99", "--eval_at must be updates of the run, at most 1"),
    ("p3o", "--sampler vllm", "--sampler vllm needs --vllm_url, the servers that sample"),
    (
        "online",
        "--objective nash_md --sampler vllm --vllm_url http://localhost:8000",
        "--mixture needs --sampler engine",
    ),
    ("p3o", "--sampler_ratio_cap 0.5", "--sampler_ratio_cap must be 0 or at least 1, got 0.5"),
    *[
        ("p3o", f"--{flag} --sampler transformers", f"--{flag.removesuffix(' 2')} needs log-probs of the sampler")
        for flag in ("sampler_ratio_cap 2", "old_logprobs sampler")
    ],
    ("p3o", "--lora_rank 2 --trainable_layers 1", "--trainable_layers and --lora_rank exclude each other"),
    ("p3o", "--lora_rank 2 --lora_dropout 0.1", "--lora_dropout would make ratios random"),
    ("sft", "--lora_rank 2 --lora_dropout 0.1 --compile_layers", "--lora_dropout and --compile_layers exclude"),
    ("memory", "--lora_rank 2 --quantize 4bit", "--quantize: the memory of quantized bases is not predicted"),
    ("sft", "--lora_rank 2 --quantize 4bit --compile_layers", "--quantize and --compile_layers exclude each other"),
    ("p3o", "--offload maybe", "argument --offload: expected yes or no"),
    ("p3o", f"--responses_per_prompt {10**30}", "--responses_per_prompt must be at most 2**32"),
    ("p3o", "--output_dir ' '", "--output_dir must not be empty, or hold what no name can, got ' '"),
    ("p3o", "--output_dir 'a\0b'", "--output_dir must not be empty, or hold what no name can, got 'a\\x00b'"),
    ("p3o", "--nosuch 1", "unknown option --nosuch"),
    *[("p3o", f"--{name}=", f"--{name} is missing") for name in ("model", "output_dir", "prompts", "reward")],
    ("online", "--objective nosuch", "argument --objective: invalid choice: 'nosuch' (choose from "),
    ("online", "--clip_range 0.1", "unknown option --clip_range"),
    *[
        ("online", f"--objective {objective} --{name}={value}", f"--{name} must be {expected}")
        for objective, name, value, expected in (
            ("nash_md", "responses_per_prompt", "3", "even: half are the mixture's"),
            ("ppg", "inner_epochs", "2", "1, got 2: the gradient is on-policy"),
            ("ppg", "clip_range", "0.1", "0.2, got 0.1"),
            ("ppg", "kl_reward", "rollout", "current, got rollout"),
            ("ppg", "old_logprobs", "sampler", "policy, got sampler"),
        )
    ],
    (
        "online",
        "--objective ppg --prompts_per_minibatch 2",
        "--prompts_per_minibatch must be 4, got 2",
    ),
    (
        "online",
        "--objective ppg --clip_range 0.1 --ratio_cap 2 --inner_epochs 2",
        "got 0.1; --ratio_cap must be 10.0, got 2.0; --inner_epochs must be 1",
    ),
    ("p3o", "--temprature 0.7", "unknown option --temprature; the nearest one is --temperature"),
    ("online", "--objective nash_md --top_p 0.9", "exclude a mixture with the reference"),
    ("online", "--objective online_ipo --mixture 0.5 --min_p 0.1", "exclude a mixture with the reference"),
    ("p3o", "--update 3", "unknown option --update; the nearest one is --updates"),
    ("p3o", "--resume no more", "unexpected argument 'more'"),
    ("online", "--objective dapo --kl_estimator k2", "--kl_estimator does nothing without --kl_coef"),
    *[
        ("online", f"--objective {flags}", "needs log-probs of the sampler, and responses of --mixture have none")
        for flags in (
            "nash_md --old_logprobs sampler",
            "nash_md --sampler_ratio_cap 2",
            "online_ipo --mixture 0.1 --old_logprobs sampler",
            "online_ipo --mixture 0.1 --sampler_ratio_cap 2",
        )
    ],
    ("p3o", "--sampler_ratio_cap 2 --old_logprobs sampler", "exclude each other: both correct for the same"),
    *[
        ("online", f"--objective {name} --old_logprobs sampler", "--old_logprobs sampler changes no ratio")
        for name in ("rloo", "online_dpo")
    ],
    ("online", "--objective ppg --clipping joint", "argument --clipping: invalid choice: 'joint'"),
    ("online", "--target_kl 1 --kl_coef 0", "--target_kl adapts --kl_coef, which must be above 0"),
    (
        "online",
        "--reference_every 1 --reference_decay 0.5",
        "--reference_every and --reference_decay exclude each other",
    ),
    ("online", "--reference_every 1 --lora_rank 2", "--reference_every and --reference_decay need whole weights"),
    ("online", "--objective nash_md --lora_rank 2", "--mixture samples from a reference of its own"),
    ("online", "--objective nash_md --offload", "--mixture and --offload exclude each other"),
    ("online", "--objective nash_md --sampler transformers", "--mixture needs --sampler engine"),
    ("preference", "--desirable_weight 2", "unknown option --desirable_weight"),
    ("preference", "--objective simpo --label_smoothing 0.1", "unknown option --label_smoothing"),
    (
        "preference",
        "--objective simpo --reference models/whole",
        "--reference does nothing without --eval_prompts or an --objective with a reference",
    ),
    *[
        ("preference", f"--eval_prompts prompts.jsonl --{name}", f"--{name.split()[0]} does nothing without --reward")
        for name in ("gold_reward models/reward", "reward_weights 1", "reward_columns answer")
    ],
    ("preference", "--eval_prompts prompts.jsonl --reward_timeout 9", "--reward_timeout does nothing without a URL or"),
    ("win_rate", "--judge_url http://a", "--judge_url and --judge_model go together"),
    ("win_rate", "--judge m:f --judge_url http://a --judge_model m", "--judge and --judge_url exclude each other"),
    *[
        ("generate", f"--{name}", message)
        for name, message in {
            "keep rso --accept 1": "--accept must be at least 2",
            "keep rso --accept 8": "--accept (8) must be below --responses_per_prompt (8): all of them would be",
            "keep rs_dpo --responses_per_prompt 1": "--responses_per_prompt must be at least 2",
        }.items()
    ],
    ("memory", "--precision auto", "--precision: invalid choice: 'auto' (choose from "),
    ("make_tiny_llama", "--heads 3", "--hidden_size must be an even multiple of --heads"),
]

# --- flags that a run refuses, when it uses them --------------------------------------------------------------------

USES = [
    ("p3o", "--reward_columns prompt", "--reward_columns asks for the column 'prompt', which is the prompt itself"),
    (
        "p3o",
        "--reward_columns answer",
        "field 'answer': expected a value, which --reward_columns asks for, got nothing",
    ),
    ("p3o", f"{AWAY} --reward_retries 0", "http://127.0.0.1:1/score does not answer: ConnectionRefusedError"),
    (
        "p3o",
        f"{AWAY},rewards_for_tests:vowels --reward_retries 1",
        "ConnectionRefusedError: [Errno 111] Connect call failed ('127.0.0.1', 1) (attempts: 2)",
    ),
    (
        "p3o",
        f"--eval_prompts prompts.jsonl --gold_{AWAY.removeprefix('--')} --reward_retries 0",
        "http://127.0.0.1:1/score does not answer",
    ),
    ("win_rate", f"{AWAY} --reward_retries 0", "http://127.0.0.1:1/score does not answer"),
    ("p3o", "--reward http://host/a?b=c", "the endpoint must be a URL such as http://localhost:8000/v1"),
    ("p3o", f"--reward {TWO},rewards_for_tests:nosuch", "cannot load the reward function 'rewards_for_tests:nosuch'"),
    ("p3o", f"--reward {TWO},./nosuch", "cannot load ./nosuch: there is no such folder"),
    ("p3o", "--lora_rank 100000", "--lora_rank is 100000, and the model's matrices have a rank of 32 at most"),
    ("p3o", "--lora_rank 2 --lora_targets nosuch", "--lora_targets nosuch: Target modules {'nosuch'} not found"),
    ("p3o", "--lora_rank 2 --lora_targets lm_head", "leave it out of --lora_targets"),
    ("p3o", "--trainable_layers 100", "--trainable_layers is 100, and the model has 2 layers"),
    ("p3o", "--report_to nosuch", "--report_to: nosuch is not installed or not a tracker of accelerate's"),
    (
        "p3o",
        "--max_prompt_tokens 4000",
        "the positions of LlamaForCausalLM (models/whole) end at 2048: lower --max_prompt_tokens",
    ),
    ("p3o", "--warmup_steps 100", "--warmup_steps is 100, and the run has 4 optimizer steps"),
    ("p3o", "--split nosuch", "prompts.jsonl: there is no split 'nosuch': all that files hold is 'train'"),
    ("p3o", "--eval_prompts prompts.jsonl --eval_split test", "prompts.jsonl: there is no split 'test'"),
    ("p3o", "--split train[:2]", "the split 'train[:2]' has a slice, which only the hub takes"),
    ("p3o", "--eval_prompts ./nosuch.jsonl", "./nosuch.jsonl: no such file or folder"),
    ("online", "--ptx_data nosuch.jsonl", "nosuch.jsonl: no such file or folder"),
    ("online", "--ptx_data prompts.jsonl", "prompts.jsonl record 1: expected the fields of one of the layouts"),
    ("sft", "--train_data nosuch.jsonl", "nosuch.jsonl: no such file or folder"),
    ("preference", "--train_data unpaired.jsonl", "record 1: expected the fields of one of the layouts prompt/chosen/"),
    ("sft", "--train_data unpaired.jsonl", "record 1: expected one response in the fields label, completion"),
    ("reward_model", "--lora_rank 2 --lora_targets score", "leave it out of --lora_targets"),
    ("reward_model", "--train_data preferences.jsonl,nosuch.jsonl", "nosuch.jsonl: no such file or folder"),
    ("reward_model", "--train_data preferences.jsonl,", "expected names with commas between, got an empty one"),
    ("reward_model", "--train_data sft.jsonl,sft.jsonl", "sft.jsonl comes more than once"),
    ("memory", "--model ./nosuch", "cannot load ./nosuch: there is no such folder"),
    ("make_tiny_llama", "--text rewards_for_tests.py", "rewards_for_tests.py: expected a file that ends with one of"),
    *[
        ("preference", f"--objective kto --train_data {name}.jsonl", "the fields of the layout prompt/completion/label")
        for name in ("preferences", "sft", "prompts")
    ],
    ("p3o", "--reward http://me:secret@a/score", "without user, got 'a/score'"),
    ("p3o", "--sampler vllm --vllm_url http://me:secret@a:8000", "without user, got 'a:8000/version'"),
    ("generate", "--reward https://a/score?key=secret", "without user, got 'https://a/score'"),
    ("win_rate", "--judge_url http://me:secret@a/v1 --judge_model m", "without user, got 'a/v1'"),
    ("win_rate", "--judge_url ftp://a --judge_model m", "the endpoint must be a URL such as http://localhost:8000/v1"),
    ("win_rate", "--judge nosuch_module:f", "cannot load the judge 'nosuch_module:f': No module named 'nosuch_module'"),
    ("generate", "--prompts nosuch.jsonl", "nosuch.jsonl: no such file or folder"),
    ("generate", "--output_dir prompts.jsonl", "--output_dir prompts.jsonl is a file"),
    ("generate", "--output_dir models", "--model models/whole lies in --output_dir models"),
]

# --- YAML -----------------------------------------------------------------------------------------------------------

YAML = [
    ("modle: m\n", "run.yaml has fields that P3OConfig does not: modle"),
    ("updates: 1\nseed: 1\nupdates: 2\n", "run.yaml gives more than one value for updates"),
    ("updates: [1]\n", "run.yaml must give one value for updates, not a list"),
    ("updates:\n", "run.yaml gives no value for updates"),
    ("updates: many\n", "argument --updates: invalid int value: 'many'"),
    ("updates: 0\n", "--updates must be at least 1, got 0"),
    ("learning_rate: .inf\n", "--learning_rate: invalid float value: '.inf'"),
    ("resume: maybe\n", "argument --resume: expected yes or no"),
    ("- updates\n", "run.yaml must hold one `field: value` a line"),
    ("", "run.yaml must hold one `field: value` a line"),
    ("updates: [\n", "cannot read run.yaml"),
    ("a: 1\n---\nb: 2\n", "cannot read run.yaml"),
    ("updates: 1\n\tseed: 2\n", "cannot read run.yaml"),
    (b"model: \xff\xfe\n", "cannot read run.yaml"),
    ("? [a, b]\n: 1\n", "run.yaml has fields that P3OConfig does not"),
    ("!!python/object/apply:os.system ['true']\n", "run.yaml must hold one `field: value` a line"),
]

# --- data -----------------------------------------------------------------------------------------------------------

PAIR = {"prompt": "Say tree:", "chosen": " tree", "rejected": " zzz"}
DEMONSTRATION = {"prompt": "Say tree:", "label": " tree"}
USER, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}

# Second lines after a good one: (the line, the message after `data.jsonl record 2`).
PROMPTS = [
    ("{", ": expected valid JSON, got text that is not"),
    ('{"prompt": "a"} {"prompt": "b"}', ": expected valid JSON, got text that is not (Extra data"),
    ('{"prompt": "a", "prompt": "b"}', ": expected valid JSON, got text that is not (a field's name comes twice"),
    ("prompt", ": expected valid JSON"),
    ("[" * 100_000, ": expected a JSON object, got values nested too deeply"),
    ('{"prompt": ' + "9" * 5000 + "}", ": expected valid JSON"),
    ([PAIR], ": expected an object, got a list of 1"),
    ("NaN", ": expected an object, got the number nan"),
    ({}, " field 'prompt': expected text, got nothing: the field is missing"),
    ({"prompt": 10**30}, " field 'prompt': expected text, got a number of more than twelve digits"),
    ('{"prompt": 1e999}', " field 'prompt': expected text, got a number of more than twelve digits"),
    ({"prompt": "long " * 210_000}, " field 'prompt': expected at most 1000000 characters, got 1050000 of them"),
    ({"prompt": [USER]}, ": holds messages, and the tokenizer has no chat template"),
]
DEMONSTRATIONS = [
    ({"prompt": "a"}, " field 'label': expected text, got nothing: the field is missing"),
    ({"prompt": "a", "label": "b", "completion": "c"}, ": expected one response in the fields label, completion"),
]
PREFERENCES = [
    ({"prompt": "a", "chosen": "b"}, " field 'rejected': expected text, got nothing: the field is missing"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, " field 'rejected': expected another response than 'chosen'"),
    ({"prompt": "a", "chosen": "b" * 20 + "c", "rejected": "b" * 20 + "d"}, " field 'rejected': expected another"),
]
MARGINS = [
    ({**PAIR, "margin": margin}, f" field 'margin': expected a finite number, 0 or more, got {found}")
    for margin, found in {
        "large": "a string",
        -1: "the number -1",
        True: "true",
        float("inf"): "a number of more than twelve digits",
    }.items()
]
RANKING = {"prompt": "a", "ranked_responses": ["b", "c", "d"]}
RANKED = [
    *[
        (
            {"prompt": "a", **ranked},
            f" field 'ranked_responses': expected a list of two responses or more, from best to worst, got {found}",
        )
        for ranked, found in (
            ({}, "nothing: the field is missing"),
            ({"ranked_responses": "b"}, "a string"),
            ({"ranked_responses": {"b": 1}}, "an object with the fields b"),
            ({"ranked_responses": []}, "a list of 0"),
            ({"ranked_responses": ["b"]}, "a list of 1"),
        )
    ],
    ({"prompt": "a", "ranked_responses": ["b", None]}, " field 'ranked_responses[1]': expected text, got null"),
    ({"prompt": "a", "ranked_responses": ["b", ["c"]]}, " field 'ranked_responses[1]': expected text, got a list of 1"),
    (
        {"prompt": "a", "ranked_responses": ["b", "c", "b"]},
        " field 'ranked_responses[2]': expected another response than 'ranked_responses[0]', got the same",
    ),
    (
        {**RANKING, "margin": 1},
        " field 'margin': expected none in a ranking: it is of two responses, got the number",
    ),
    ({"ranked_responses": ["b", "c"]}, " field 'prompt': expected text, got nothing: the field is missing"),
]
# First lines, with the tokenizer of models/chat.
MESSAGES = [
    ({"messages": [REPLY, REPLY]}, " field 'messages': expected a last message of user or tool, got one of role"),
    (
        {"messages": [{**USER, "role": "critic"}, USER, REPLY]},
        " field 'messages': expected a message that the chat template writes, got one of 'critic' that it drops",
    ),
    (
        {"messages": [{**USER, "name": "<end>"}, REPLY]},
        " field 'messages': expected a message without the text of a special token, got one with it",
    ),
    (
        {"messages": [{**USER, "content": "refuse"}, REPLY]},
        " field 'messages': expected messages that the chat template",
    ),
]

# Whole files: (name, content, message).
FILES = [
    ("data.jsonl", "", "data.jsonl: expected at least one usable record, got none"),
    ("data.jsonl", "\n\n", "data.jsonl: expected at least one usable record, got none"),
    ("data.jsonl", b"\xff\xfe{\x00", "data.jsonl record 1: expected text in UTF-8"),
    ("data.jsonl", lines({"text": "a"}), "record 1: expected the fields of one of the layouts"),
    ("data.json", "[", "data.json: expected valid JSON, got text that is not"),
    ("data.json", "[]", "data.json: expected at least one usable record, got none"),
    ("data.json", "[1]", "data.json record 1: expected an object, got the number 1"),
    ("data.json", '{"data": [{"prompt": "a"}]}', "data.json record 1: expected the fields of one of the layouts"),
    ("data.jsonl.gz", gzip.compress(lines(PAIR).encode(), mtime=0)[:-9], "data.jsonl.gz: cannot be read"),
    ("data.jsonl.gz", lines(PAIR), "data.jsonl.gz: cannot be read"),
    ("data.parquet", lines(PAIR), "data.parquet: cannot be read"),
    ("data.parquet", b"PAR1PAR1", "data.parquet: cannot be read"),
    ("data.csv", "prompt\na\n", "data.csv: expected a file that ends with one of .jsonl"),
    ("data.txt", "a\n", "data.txt: expected a file that ends with one of .jsonl"),
    ("folder/notes.md", "a", "folder: no file in this folder ends with one of .jsonl"),
    ("folder/eval.jsonl", lines(PAIR), "folder: no file is named after the split 'train'; found eval.jsonl"),
]

# --- reward functions -----------------------------------------------------------------------------------------------

REWARDS = """
import asyncio
import os
import sys
def numbers(prompts, responses): return [1.0] * len(responses)
def not_finite(prompts, responses): return [float("nan")] * len(responses)
def answered(prompts, responses, answer): return [1.0] * len(responses)
def reversed(responses, prompts): return [1.0] * len(responses)
def of_prompt(prompts, responses, prompt): return [1.0] * len(responses)
def leaves(prompts, responses): sys.exit(0)
def elsewhere(prompts, responses): os.chdir("/"); return [float("nan")] * len(responses)
async def slow(prompts, responses): await asyncio.sleep(60)
constant = 3
"""
HOLES = lines({"prompt": "a", "answer": 1}, {"prompt": "b", "answer": None})
REWARD_FUNCTIONS = [
    ("not_finite", "a reward is NaN or infinite (8 values)"),
    ("leaves", "bad_rewards:leaves ended the program (sys.exit, status 0) instead of returning"),
    ("elsewhere", "nothing was trained before that"),
    ("slow --reward_timeout 0.5", "bad_rewards:slow has not returned after 0.5 s (--reward_timeout)"),
    (
        "answered",
        "prompts.jsonl record 1 field 'answer': expected a value, which the reward function bad_rewards:answered asks "
        "for, got nothing: the record has the fields prompt",
    ),
    (
        "answered --prompts holes.jsonl",
        "holes.jsonl record 2 field 'answer': expected a value, which the reward function bad_rewards:answered asks "
        "for, got null",
    ),
    (
        "numbers --eval_prompts prompts.jsonl --gold_reward bad_rewards:answered",
        "prompts.jsonl record 1 field 'answer': expected a value, which the reward function bad_rewards:answered asks",
    ),
    ("reversed", "bad_rewards:reversed must take prompts and responses first, in this order"),
    ("of_prompt", "bad_rewards:of_prompt asks for the column 'prompt', which is the prompt itself"),
    ("constant", "cannot load the reward function 'bad_rewards:constant': it is a int, not a function"),
    ("nosuch", "cannot load the reward function 'bad_rewards:nosuch': module 'bad_rewards' has no attribute"),
]
REWARD_MODULES = [
    ("def f(:", "SyntaxError"),
    ("import nosuch_package", "No module named 'nosuch_package'"),
    ("1 / 0", "ZeroDivisionError: division by zero"),
    ("import sys; sys.exit(0)", "SystemExit: 0"),
]

# --- models ---------------------------------------------------------------------------------------------------------

MODELS = [
    ("p3o", "--model models/headless", "does not hold the weights of its model: it lacks lm_head.weight"),
    ("p3o", "--model models/layerless", "it lacks model.layers.1."),
    ("p3o", "--model models/more", "it also has model.extra.weight"),
    ("p3o", "--model models/broken_config", "cannot load models/broken_config: "),
    ("p3o", "--model models/broken_generation", "cannot load models/broken_generation: "),
    ("p3o", "--model models/no_config", "cannot load models/no_config: "),
    ("p3o", "--model models/no_tokenizer", "cannot load models/no_tokenizer: it has no tokenizer's files"),
    ("p3o", "--model models/broken_tokenizer", "cannot load models/broken_tokenizer: "),
    ("p3o", "--model models/no_end", "the tokenizer of models/no_end has no end-of-sequence token"),
    ("p3o", "--model models/short", "the positions of LlamaForCausalLM (models/short) end at 16"),
    ("p3o", "--model models/not_finite", "has weights that are NaN or infinite in torch.float32: model.norm.weight"),
    ("p3o", "--model models/not_finite_where_unused", "NaN or infinite in torch.float32: model.embed_tokens.weight"),
    ("p3o", "--model models/int8", "int8/model.safetensors has model.norm.weight in I8; quantized weights are not"),
    ("p3o", "--model models/rope", "cannot load models/rope: its JSON files lack 'nosuch', or name it"),
    ("p3o", "--model models/list_config", "models/list_config/config.json must hold a JSON object, got a list"),
    ("p3o", "--model models/list_tokenizer", "tokenizer_config.json must hold a JSON object, got a list"),
    ("p3o", "--model models/empty_tokenizer", "empty_tokenizer: its JSON files lack 'added_tokens', or name it"),
    ("p3o", "--model models/adapter_of_nothing", "its adapter_config.json names no base model"),
    ("p3o", "--model models/adapter_of_no_folder", "names the base model runs/no/model, and there is no such folder"),
    ("p3o", "--model models/reward", "it lacks lm_head.weight; it also has score.weight"),
    ("p3o", "--model models/nosuch/model", "cannot load models/nosuch/model: there is no such folder"),
    ("p3o", "--model prompts.jsonl", "cannot load prompts.jsonl: it is a file, and models are folders"),
    ("p3o", "--reference models/permuted", "that of models/permuted is not that of models/whole: 2 tokens have"),
    ("p3o", "--reference models/headless", "it lacks lm_head.weight"),
    (
        "p3o",
        "--reward models/reward_short",
        "positions of LlamaForSequenceClassification (models/reward_short) end at 16",
    ),
    ("p3o", "--gold_reward models/whole --eval_prompts prompts.jsonl", "models/whole is no trained reward model"),
    ("reward_model", "--model models/two_labels", "models/two_labels has 2 outputs; a reward model has one"),
    ("preference", "--reference models/headless", "it lacks lm_head.weight"),
    ("preference", "--eval_prompts prompts.jsonl --reward models/whole", "models/whole is no trained reward model"),
    ("win_rate", "--second models/no_tokenizer", "cannot load models/no_tokenizer: it has no tokenizer's files"),
]

DATA_OF = {"p3o": "--prompts", "sft": "--train_data", "reward_model": "--train_data"}

CONFIGURED = [
    *(Case(*case) for case in FLAGS),
    *(Case("p3o", "run.yaml", message, {"run.yaml": content}) for content, message in YAML),
    *(
        Case("preference", "run.yaml", message, {"run.yaml": content})
        for content, message in (
            ("objective: nosuch\n", "argument --objective: invalid choice: 'nosuch' (choose from "),
            ("objective: [dpo]\n", "run.yaml must give one value for objective, not a list"),
            ("objective: dpo\nobjective: kto\n", "run.yaml gives more than one value for objective"),
            (
                "objective: simpo\nlabel_smoothing: 0.1\n",
                "run.yaml has fields that SimPOConfig does not: label_smoothing",
            ),
        )
    ),
]
# One of each kind of error, and one of each script.
KINDS = (
    *("--learning_rate=0", "--clip_range nan", "--learning_rate fast", "--lr_schedule greedy", "--offload maybe"),
    *("--lora_alpha 8", "--prompts_per_minibatch 3", "--eval_at 1,two", "--output_dir ' '", "--nosuch 1", "--model="),
)
SAMPLE = [
    *(case for case in CONFIGURED if case.script == "p3o" and case.flags in KINDS),
    *(next(case for case in CONFIGURED if case.script == script) for script in SCRIPTS),
    *(case for case in CONFIGURED if case.message.startswith(("run.yaml has", "cannot read", "--updates must"))),
]

CASES = [
    *SAMPLE,
    *(Case(*case) for case in (*USES, *MODELS)),
    *(
        Case(script, f"{DATA_OF[script]} data.jsonl", f"data.jsonl record 2{said}", {"data.jsonl": lines(good, record)})
        for script, good, table in (
            ("p3o", PAIR, PROMPTS),
            ("sft", DEMONSTRATION, DEMONSTRATIONS),
            ("reward_model", PAIR, [*PREFERENCES, *MARGINS]),
            ("reward_model", RANKING, RANKED),
        )
        for record, said in table
    ),
    *(
        Case("sft", "--model models/chat --train_data data.jsonl", f"record 1{said}", {"data.jsonl": lines(record)})
        for record, said in MESSAGES
    ),
    Case(
        "preference",
        "--objective kto --train_data data.jsonl",
        "--train_data: KTO needs two different prompts at least, for z0, and all are the same",
        {"data.jsonl": lines(*({"prompt": "a", "completion": "b", "label": label} for label in (True, False)))},
    ),
    *(Case("p3o", f"--prompts {name.split('/')[0]}", message, {name: content}) for name, content, message in FILES),
    Case("p3o", "--prompts *.nosuch", "*.nosuch: no file matches"),
    Case(
        "p3o",
        "--model models/hangs --prompts data.jsonl",
        "the chat template has not ended after 0.5 s, for field 'prompt'",
        {"data.jsonl": lines({"prompt": [USER]})},
    ),
    *(
        Case("p3o", f"--reward bad_rewards:{name}", message, {"bad_rewards.py": REWARDS, "holes.jsonl": HOLES})
        for name, message in REWARD_FUNCTIONS
    ),
    *(
        Case(
            "p3o",
            "--reward bad_rewards:f",
            f"cannot load the reward function 'bad_rewards:f': {said}",
            {"bad_rewards.py": content},
        )
        for content, said in REWARD_MODULES
    ),
]
