"""Two processes on the CPU, as `accelerate launch` starts one on each GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.fastp3o.runs import metrics

ROOT = Path(__file__).parents[3]


def launch(script: str, *flags: str, processes: int = 2) -> subprocess.CompletedProcess:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return subprocess.run(
        [*torchrun, str(ROOT / "scripts" / script), "--report_to", "none", "--precision", "fp32", *flags],
        env=os.environ
        | {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), ".", os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=300,
    )


P3O = ("p3o.py", "--prompts", "prompts.jsonl", "--reward", "rewards_for_tests:vowels", "--max_response_tokens", "6")


def test_two_processes_train_and_resume(workplace, tiny_model):
    flags = ["--model", tiny_model, "--prompts_per_update", "8", "--prompts_per_minibatch", "4", "--save_every", "1"]
    flags += ["--eval_prompts", "prompts.jsonl", "--learning_rate", "1e-3", "--clipping", "token"]
    done = launch(*P3O, *flags, "--updates", "2", "--output_dir", "run")
    assert done.returncode == 0, done.stderr
    again = launch(*P3O, *flags, "--updates", "3", "--output_dir", "run", "--resume")
    assert again.returncode == 0, again.stderr
    steps = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    evaluations = [json.loads(line) for line in Path("run/eval.jsonl").read_text().splitlines()]
    assert all(evaluation["prompts"] == 8 for evaluation in evaluations)
    assert evaluations[0]["kl"] == 0
    AutoModelForCausalLM.from_pretrained("run/model")


def test_two_processes_sample_what_one_does(workplace, tiny_model):
    """Up to the first update, after which gradients are added in another order."""
    flags = ["--model", tiny_model, "--prompts_per_update", "8", "--prompts_per_minibatch", "4", "--updates", "1"]
    flags += [
        "--eval_prompts",
        "prompts.jsonl",
        "--eval_responses_per_prompt",
        "2",
        "--reward",
        "rewards_for_tests:varied",
    ]
    for processes in (1, 2):
        done = launch(*P3O, *flags, "--output_dir", f"run{processes}", processes=processes)
        assert done.returncode == 0, done.stderr
    (alone,), (together,) = (metrics(f"run{processes}") for processes in (1, 2))
    for name in ("reward", "reward_difference", "kl", "entropy", "response_length", "missing_eos", "response_tokens"):
        assert alone[name] == pytest.approx(together[name], rel=1e-5, abs=1e-6), name
    assert max(alone["sampler_gap"], together["sampler_gap"]) < 1e-4
    alone, together = (metrics(f"run{processes}", "eval.jsonl")[0] for processes in (1, 2))
    assert alone == pytest.approx(together, rel=1e-5)


def test_ppo_trains_and_resumes_in_two_processes(workplace, tiny_model):
    flags = [
        "--model",
        tiny_model,
        "--prompts_per_update",
        "8",
        "--prompts_per_minibatch",
        "4",
        "--learning_rate",
        "1e-3",
    ]
    for updates, more in (("1", ["--save_every", "1"]), ("2", ["--resume"])):
        done = launch("ppo.py", *P3O[1:], *flags, "--updates", updates, "--output_dir", "run", *more)
        assert done.returncode == 0, done.stderr
    assert [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_weights_in_half_precision_train_in_two_processes(workplace, tiny_model):
    flags = [
        "--model",
        tiny_model,
        "--prompts_per_update",
        "8",
        "--prompts_per_minibatch",
        "4",
        "--learning_rate",
        "1e-2",
    ]
    flags += ["--reward", "rewards_for_tests:varied"]
    done = launch(*P3O, *flags, "--updates", "2", "--output_dir", "run", "--precision", "bf16")
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines())
    assert first["kl"] == 0
    assert second["kl"] != 0


def test_pairs_that_do_not_divide_are_refused(workplace, tiny_model):
    flags = ["--model", tiny_model, "--prompts_per_update", "9", "--prompts_per_minibatch", "9", "--output_dir", "run"]
    done = launch(*P3O, *flags)
    assert done.returncode != 0
    assert "--prompts_per_update (9) must be a multiple of the number of processes (2)" in done.stderr
