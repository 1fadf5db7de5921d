"""Two processes on the CPU, as `accelerate launch` starts one on each GPU, against one. Runs share
them, for time.

What torchrun itself does is tested with it; everything else runs in processes that are forked, for
time, too.
"""

import json
from collections.abc import Sequence
from itertools import chain, product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from fastp3o.run import log
from tests.fastp3o.runs import copy_at_save_before, metrics
from tests.fastp3o.together import together

RUNS = Path(__file__).with_name("runs_of_a_process.py")
# Rows of few tokens: processes have different numbers of them.
COMMON = ["--report_to", "none", "--tokens_per_row", "60"]
ONLINE = [
    *COMMON,
    "--prompts",
    "prompts.jsonl",
    "--max_response_tokens",
    "6",
    "--updates",
    "2",
    "--samples_every",
    "0",
]
ONLINE += ["--prompts_per_update", "8", "--prompts_per_minibatch", "4", "--inner_epochs", "2"]
ONLINE += ["--learning_rate", "3e-4", "--reward", "rewards_for_tests:varied"]
EVALUATED = [
    "--eval_prompts",
    "prompts.jsonl",
    "--eval_limit",
    "5",
    "--eval_responses_per_prompt",
    "2",
]
SUPERVISED = [
    *COMMON,
    "--batch_size",
    "6",
    "--epochs",
    "2",
    "--learning_rate",
    "3e-4",
    "--max_response_tokens",
    "20",
]
FP32, FP16 = ["--precision", "fp32"], ["--precision", "fp16"]


def train(runs: dict[str, Sequence[str]], folder: str, processes: int) -> None:
    arguments = [
        [*arguments, "--output_dir", f"{folder}/{name}"] for name, arguments in runs.items()
    ]
    done = together(RUNS, *[part for run in arguments for part in ("+", *run)], processes=processes)
    assert done.returncode == 0, done.stdout


def furthest(*runs: str, file: str = "model/model.safetensors") -> float:
    """The largest difference of a weight of two runs' finished models."""
    first, second = (load_file(f"{run}/{file}") for run in runs)
    assert first.keys() == second.keys()
    return max((first[key].float() - second[key].float()).abs().max().item() for key in first)


def assert_same_metrics(
    name: str, file: str = "metrics.jsonl", tolerance: float = 1e-4, folder: str = "two"
) -> None:
    """But for those of rows, which are others, and of rounding."""
    for one, two in zip(
        metrics(f"one/{name}", file), metrics(f"{folder}/{name}", file), strict=True
    ):
        names = one.keys() - {"packing_efficiency", "ratio/noise", "sampler_gap"}
        assert {key: two[key] for key in names} == pytest.approx(
            {key: one[key] for key in names}, abs=tolerance
        )


def test_two_processes_train_what_one_does(workplace, tiny_model):
    p3o, ppo = (["p3o", *ONLINE, "--model", tiny_model], ["ppo", *ONLINE, "--model", tiny_model])
    sft = [
        "sft",
        *SUPERVISED,
        "--model",
        tiny_model,
        "--train_data",
        "sft.jsonl",
        "--eval_data",
        "sft.jsonl",
    ]
    judge = ["reward", *SUPERVISED, "--model", tiny_model, "--train_data", "preferences.jsonl"]
    ranked = [
        {"prompt": f"Say {n}:", "ranked_responses": ["abcde"[k:] for k in range(2 + n % 3)]}
        for n in range(9)
    ]
    Path("ranked.jsonl").write_text("".join(json.dumps(record) + "\n" for record in ranked))
    both = [
        "--train_data",
        "ranked.jsonl,preferences.jsonl",
        "--eval_data",
        "ranked.jsonl",
        "--centring",
        "0.1",
    ]
    runs = {
        "ranked": [*judge, *FP32, *both, "--lora_rank", "2"],
        "fp16": [*p3o, *FP16, "--gradient_checkpointing", "True"],
        "critic": [*ppo, *FP32],
        "sft": [*sft, *FP32],
        "judge": [*judge, *FP32, "--eval_data", "preferences.jsonl"],
        "vectors": [*judge, *FP32, *both[:4], "--preference_dim", "4"],
    }
    rewarded = [*p3o, *EVALUATED, *FP32, "--offload", "True"]
    for folder, processes in (("one", 1), ("two", 2), ("cut", 2)):
        own = {"rewarded": [*rewarded, "--reward", f"{folder}/judge/model"]}
        own["compared"] = [*rewarded, "--reward", f"{folder}/vectors/model"]
        if folder == "two":  # whose groups go through the layers in parts
            own["critic"] = [*runs["critic"], "--tokens_per_row", "10"]
        cut = ["--tensor_parallel", "2"] if folder == "cut" else []
        train({name: [*run, *cut] for name, run in (runs | own).items()}, folder, processes)
    for folder, name in product(("two", "cut"), (*runs, "rewarded", "compared")):
        assert furthest(f"one/{name}", f"{folder}/{name}") <= (1e-3 if name == "fp16" else 3e-6), (
            folder,
            name,
        )
        assert_same_metrics(name, tolerance=1e-2 if name == "fp16" else 1e-4, folder=folder)
    for folder, name in product(
        ("two", "cut"), ("ranked", "sft", "judge", "vectors", "rewarded", "compared")
    ):
        assert_same_metrics(name, "eval.jsonl", folder=folder)
    for folder in ("two", "cut"):
        assert (
            furthest("one/ranked", f"{folder}/ranked", file="adapter/adapter_model.safetensors")
            <= 3e-6
        )
    assert metrics("two/rewarded", "eval.jsonl")[0]["kl"] == 0
    assert all(0.5 < line["balance"] <= 1 for line in metrics("two/rewarded"))
    logged, *others = (
        list(log.read(Path(folder, "critic/rollouts.jsonl"))) for folder in ("one", "two", "cut")
    )
    for one, two in chain.from_iterable(zip(logged, other, strict=True) for other in others):
        for a, b in zip(one["responses"], two["responses"], strict=True):
            assert (one["prompt"], a["ids"], a["reward"]) == (two["prompt"], b["ids"], b["reward"])
            assert a["log_ratio"] == pytest.approx(b["log_ratio"], abs=1e-4)
    policy = AutoModelForCausalLM.from_pretrained("two/fp16/model")
    assert policy.dtype == torch.float16
    assert policy.lm_head.weight is policy.model.embed_tokens.weight


def test_minibatches_of_fewer_prompts_than_processes_and_groups_of_processes(workplace, tiny_model):
    """The defaults on eight GPUs; and HSDP."""
    runs = {"hsdp": ["p3o", *ONLINE, *FP32, "--model", tiny_model, "--prompts_per_minibatch", "2"]}
    train(runs, "one", 1)
    train({"hsdp": [*runs["hsdp"], "--shard_size", "2"]}, "two", 4)
    assert furthest("one/hsdp", "two/hsdp") <= 3e-6
    assert_same_metrics("hsdp")
    # two of four have no row in a step
    assert all(line["balance"] <= 0.5 for line in metrics("two/hsdp"))


def test_layers_cut_by_two_and_spread_over_two_train_what_one_process_does_and_go_on_elsewhere(
    workplace, tiny_model
):
    """A model with norms of heads and a vocabulary that two does not divide; a tied one with a
    moving reference.
    """
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer) // 2 * 2 + 1,
    }
    special = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes, **special)).save_pretrained("odd")
    tokenizer.save_pretrained("odd")
    data, state = (
        ["--train_data", "preferences.jsonl", "--eval_data", "preferences.jsonl"],
        ["--save_every", "1"],
    )
    runs = {
        "p3o": ["p3o", *ONLINE, *EVALUATED, *FP32, *state, "--model", "odd"],
        "dpo": [
            "preference",
            "--objective",
            "dpo",
            *SUPERVISED,
            "--batch_size",
            "8",
            *data,
            *FP32,
            *state,
            "--model",
            "odd",
        ],
        "tied": ["p3o", *ONLINE, *FP32, *state, "--model", tiny_model, "--reference_decay", "0.5"],
    }
    cut = {name: [*run, "--tensor_parallel", "2"] for name, run in runs.items()}
    train(runs, "one", 1)
    train(cut, "two", 4)
    for (ended, resumed), name in product((("two", "alone"), ("one", "cut")), runs):
        copy_at_save_before(f"{ended}/{name}", f"{resumed}/{name}")
    train({name: [*run, "--resume"] for name, run in runs.items()}, "alone", 1)
    train({name: [*run, "--resume"] for name, run in cut.items()}, "cut", 2)
    for folder, name in product(("two", "alone", "cut"), runs):
        assert furthest(f"one/{name}", f"{folder}/{name}") <= 3e-6, (folder, name)
        assert_same_metrics(name, folder=folder)
    for name in ("p3o", "dpo"):
        assert_same_metrics(name, "eval.jsonl")


@pytest.mark.parametrize(
    ("flags", "says", "times"),
    [
        (
            ["--prompts_per_update", "9", "--prompts_per_minibatch", "9"],
            "--prompts_per_update (9) must be a multiple of the number of processes (2)",
            1,
        ),
        (
            ["--lora_rank", "2", "--quantize", "4bit"],
            "--quantize trains in one process: quantized weights are not",
            2,
        ),
        (
            [*FP32, "--reward", "rewards_for_tests:raises_on_third_call", "--updates", "3"],
            "KeyError: 'lost'; the model before that is in run/stopped-in-000003",
            2,
        ),
    ],
    ids=["prompts that do not divide", "a quantized base", "a reward function that fails for one"],
)
def test_what_stops_both_processes(workplace, tiny_model, flags, says, times):
    done = together(RUNS, "p3o", *ONLINE, "--model", tiny_model, *flags, "--output_dir", "run")
    assert done.returncode != 0
    assert done.stdout.count(says) >= times
    assert Path("run/state/step-000002").is_dir() == ("stopped-in" in says)
