"""Short runs end with the weights, metrics and files that are on record in `runs.json`: every
family of objectives, games, a run with a server, and sampling alone.

A change that is meant to keep the arithmetic keeps every hash. For one that is meant to move last
bits, `python -m tests.fastp3o.golden.test_golden_runs` records them anew. Another processor, torch
or choice of oneDNN's products rounds otherwise: where the record was made with another one, the
first step's metrics are compared as numbers.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from fastp3o_kernels.onednn import choice
from tests.fastp3o.letters import save_letters
from tests.fastp3o.rollouts.environments import LETTERS
from tests.fastp3o.rollouts.vllm.stand_in import StandIn
from tests.fastp3o.runs import metrics
from tests.fastp3o.together import together

RECORD = Path(__file__).with_name("runs.json")
RUNS = Path(__file__).parents[1] / "training" / "runs_of_a_process.py"

COMMON = ["--report_to", "none", "--learning_rate", "3e-3"]
FP32 = ["--precision", "fp32"]
ONLINE = [
    *COMMON,
    "--prompts",
    "prompts.jsonl",
    "--reward",
    "rewards_for_tests:varied",
    "--samples_every",
    "0",
]
ONLINE += [
    "--updates",
    "3",
    "--prompts_per_update",
    "8",
    "--prompts_per_minibatch",
    "4",
    "--inner_epochs",
    "2",
]
ONLINE += [
    "--max_response_tokens",
    "6",
    "--tokens_per_row",
    "60",
    "--seed",
    "3",
    "--responses_per_prompt",
    "2",
]
P3O = ["p3o", *ONLINE]
AS_GIVEN = ["--reward_scaling", "none", "--reward_clip", "0"]
FOUR = ["--responses_per_prompt", "4"]
# In so many tokens about half of the responses end by themselves.
MASKED = ["--mask_truncated", "True", "--max_response_tokens", "150", "--tokens_per_row", "1500"]
FIXED = [
    *COMMON,
    "--max_prompt_tokens",
    "32",
    "--max_response_tokens",
    "16",
    "--batch_size",
    "6",
    "--epochs",
    "2",
]
FIXED += ["--tokens_per_row", "64", "--adam_eps", "1e-2"]
SFT = ["sft", *FIXED, "--train_data", "sft.jsonl"]
PAIRS = ["preference", *FIXED, *FP32, "--train_data", "preferences.jsonl"]
EVALUATED = ["--eval_prompts", "prompts.jsonl", "--eval_limit", "3", "--eval_every", "1"]
# Trajectories of one to three turns, whose keys and values the engine keeps from turn to turn.
GAME = ["--environment", "tests.fastp3o.rollouts.environments:Echo", "--reward", "environment"]
GAME += [
    "--max_turns",
    "3",
    "--max_turn_tokens",
    "4",
    "--max_response_tokens",
    "24",
    "--tokens_per_row",
    "120",
]
GAME += ["--stop_strings", json.dumps(LETTERS)]
SAMPLED = [
    "generate",
    "--prompts",
    "prompts.jsonl",
    "--reward",
    "rewards_for_tests:varied",
    "--precision",
    "fp32",
]
SAMPLED += ["--responses_per_prompt", "4", "--rollout_batch_size", "3", "--keep_unfinished", "True"]
SAMPLED += ["--max_prompt_tokens", "32", "--max_response_tokens", "6", "--seed", "3"]


def online(objective: str, *flags: str) -> list[str]:
    return ["online", "--objective", objective, *ONLINE, *FP32, *FOUR, *flags]


# By what they share a process with: each group takes some seconds.
GROUPS = {
    "P3O": {
        "joint": [*P3O, *FP32, *EVALUATED, "--kl_coef", "0.1"],
        "separate, 16 responses": [
            *P3O,
            *FP32,
            "--clipping",
            "separate",
            "--responses_per_prompt",
            "16",
        ],
        "token": [*P3O, *FP32, *FOUR, "--clipping", "token", *MASKED],
        "joint, masked": [*P3O, *FP32, *FOUR, *MASKED],
        "ppg": online("ppg", "--inner_epochs", "1", "--prompts_per_minibatch", "0"),
        "LoRA": [*P3O, *FP32, "--lora_rank", "2"],
        "stale": [*P3O, *FP32, *FOUR, "--rounds_ahead", "1", "--old_logprobs", "sampler"],
        "capped": [
            *P3O,
            *FP32,
            *FOUR,
            "--sampler_ratio_cap",
            "2",
            "--temperature",
            "0.8",
            "--top_k",
            "50",
        ],
        "moving reference": [*P3O, *FP32, "--reference_every", "2", "--ptx_data", "sft.jsonl"],
    },
    "half precision": {
        "P3O in bf16": [*P3O, "--precision", "bf16"],
        "P3O in autocast": [*P3O, "--precision", "bf16-autocast"],
        "P3O in fp16": [*P3O, "--precision", "fp16"],
        "SFT in fp16": [*SFT, "--precision", "fp16"],
    },
    "policy gradients": {
        "reinforce": online("reinforce", *AS_GIVEN, *MASKED),
        "rloo": online("rloo", *AS_GIVEN),
        "grpo": online("grpo", *AS_GIVEN, "--kl_estimator", "k3"),
        "dapo": online("dapo", *AS_GIVEN, *MASKED),
        "gspo": online("gspo", *AS_GIVEN, "--sampler_ratio_cap", "2"),
        "rebel": online("rebel", *AS_GIVEN),
        "ppo": online("ppo", "--value_clip_range", "0.2"),
        "ppo, masked": online(
            "ppo", "--value_clip_range", "0.2", *MASKED, "--entropy_coef", "0.01"
        ),
    },
    "one step of TRPO, distillation": {
        "trpo": online(
            "trpo", "--max_kl", "1e-3", "--critic_learning_rate", "1e-2", "--learning_rate", "1e-6"
        ),
        "distillation": online("distillation", "--teacher_context", "Be brief. "),
        "distillation, sampled": online(
            "distillation", "--teacher_context", "Be brief. ", "--kl", "sampled"
        ),
    },
    "games": {
        "P3O's game": [*P3O, *FP32, *FOUR, *GAME, *EVALUATED],
        "ppo, rewards of turns": online("ppo", *GAME),
        "ppo, one reward a game": online("ppo", *GAME, "--no_process_rewards"),
    },
    "fresh pairs": {
        "online_dpo": online("online_dpo", "--kl_coef", "0.1"),
        "online_ipo": online("online_ipo"),
        "bpo": online("bpo"),
        "nash_md": online("nash_md"),
    },
    "fixed data": {
        "SFT": [*SFT, *FP32, "--eval_data", "sft.jsonl"],
        "reward model": [
            "reward",
            *FIXED,
            *FP32,
            "--train_data",
            "preferences.jsonl",
            "--centring",
            "0.1",
        ],
        "dpo": [*PAIRS, "--objective", "dpo", "--eval_data", "preferences.jsonl"],
        "simpo": [*PAIRS, "--objective", "simpo"],
        "orpo": [*PAIRS, "--objective", "orpo"],
        "kto": [*PAIRS, "--objective", "kto", "--train_data", "unpaired.jsonl"],
    },
}
SAMPLES = {
    "generate": [*SAMPLED],
    "generate, pairs": [
        *SAMPLED,
        "--keep",
        "rs_dpo",
        "--min_gap",
        "0.5",
        "--temperature",
        "0.8",
        "--top_k",
        "50",
    ],
}
SERVED = [
    *P3O,
    *FP32,
    *EVALUATED,
    "--kl_coef",
    "0.1",
    "--rounds_ahead",
    "1",
    "--sampler",
    "vllm",
    "--vllm_url",
]
BEGUN_AND_RESUMED = [*P3O, *FP32]
BOTH = [*P3O, *FP32, *FOUR, "--clipping", "token"]


def arithmetic() -> str:
    """What decides on last bits: the processor, the versions and the products that are oneDNN's."""
    model = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    capability = torch.backends.cpu.get_cpu_capability()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    onednn = " ".join(name for name, chosen in choice()._asdict().items() if chosen)
    return f"{platform.machine()}, {model.partition(':')[2].strip()}, {capability}, {versions}, oneDNN: {onednn}"


def train(runs: dict[str, list[str]], tiny_model: str, processes: int = 1) -> None:
    parts = [
        part
        for name, flags in runs.items()
        for part in ("+", *flags, "--model", tiny_model, "--output_dir", f"runs/{name}")
    ]
    done = together(RUNS, *parts, processes=processes)
    assert done.returncode == 0, done.stdout


def result(name: str) -> dict[str, Any]:
    """Hashes of a run's weights and metrics, and its first metrics."""
    weights = hashlib.sha256()
    for key, tensor in sorted(load_file(f"runs/{name}/model/model.safetensors").items()):
        weights.update(key.encode())
        weights.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    steps, evaluated = metrics(f"runs/{name}"), Path("runs", name, "eval.jsonl").exists()
    evaluations = metrics(f"runs/{name}", "eval.jsonl") if evaluated else []
    reported = hashlib.sha256(json.dumps([steps, evaluations], sort_keys=True).encode())
    return {
        "weights": weights.hexdigest()[:16],
        "metrics": reported.hexdigest()[:16],
        "first": steps[0],
    }


def samples(name: str) -> dict[str, Any]:
    """Hashes of what a run of sampling alone wrote, and its first record."""
    files = {file: Path(f"runs/{name}/{file}.jsonl").read_bytes() for file in ("samples", "kept")}
    hashes = {file: hashlib.sha256(content).hexdigest()[:16] for file, content in files.items()}
    first = json.loads(files["samples"].splitlines()[0])
    return {
        **hashes,
        "first": {f"rewards/{number}": reward for number, reward in enumerate(first["rewards"])},
    }


def require_recorded(names: list[str], read: Callable[[str], dict[str, Any]] = result) -> None:
    results = {name: read(name) for name in names}
    if recording := os.environ.get("GOLDEN_RECORD"):
        with Path(recording).open("a") as file:
            file.writelines(json.dumps({name: found}) + "\n" for name, found in results.items())
        return
    record = json.loads(RECORD.read_text())
    recorded = {name: record["runs"][name] for name in names}
    if record["arithmetic"] == arithmetic():
        got, expected = (
            {
                name: {key: value for key, value in run.items() if key != "first"}
                for name, run in runs.items()
            }
            for runs in (results, recorded)
        )
        assert got == expected, {name: run["first"] for name, run in results.items()}
    for name, one in results.items():
        # Half precision rounds a logit by so much that another token may be drawn.
        tolerance = (
            {"rel": 0.2, "abs": 0.1}
            if name in GROUPS["half precision"]
            else {"rel": 1e-3, "abs": 1e-4}
        )
        assert one["first"] == pytest.approx(recorded[name]["first"], **tolerance), name


@pytest.mark.parametrize("group", GROUPS)
def test_runs_end_as_recorded(workplace, tiny_model, group: str):
    train(GROUPS[group], tiny_model)
    require_recorded([*GROUPS[group]])


def test_a_resumed_run_ends_as_recorded(workplace, tiny_model):
    train({"resumed": [*BEGUN_AND_RESUMED, "--updates", "2"]}, tiny_model)
    train({"resumed": [*BEGUN_AND_RESUMED, "--resume", "True"]}, tiny_model)
    require_recorded(["resumed"])


def test_a_run_of_two_processes_ends_as_recorded(workplace, tiny_model):
    train({"two processes": BOTH}, tiny_model, processes=2)
    require_recorded(["two processes"])


def test_sampling_alone_writes_what_is_recorded(workplace, tiny_model, tokenizer):
    train(SAMPLES, save_letters(tiny_model, tokenizer, workplace / "letters"))
    require_recorded([*SAMPLES], samples)


def test_a_run_with_a_server_ends_as_recorded(workplace, tiny_model):
    with StandIn(tiny_model) as server:
        train({"served": [*SERVED, server.url]}, tiny_model)
    require_recorded(["served"])


def record() -> None:
    """Makes all runs, and writes what they end with."""
    with tempfile.NamedTemporaryFile() as file:
        environment = os.environ | {"GOLDEN_RECORD": file.name}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        subprocess.run(command, env=environment, check=True)
        runs = [json.loads(line) for line in Path(file.name).read_text().splitlines()]
    everything = {
        "arithmetic": arithmetic(),
        "runs": {name: one for run in runs for name, one in run.items()},
    }
    RECORD.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    record()
