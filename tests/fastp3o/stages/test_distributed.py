"""Two processes on the CPU, as `accelerate launch` starts one on each GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.fastp3o.runs import assert_equal, metrics, weights

ROOT = Path(__file__).parents[3]


def launch(script: str, *flags: str, processes: int = 2, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return subprocess.run(
        [*torchrun, *options, str(ROOT / "scripts" / script), "--report_to", "none", "--precision", "fp32", *flags],
        env=os.environ
        | {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        # gloo's connections of the processes before would be in the way of those after a restart.
        | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), ".", os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=300,
        start_new_session=True,
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


DIES_ONCE = """
import os, pathlib, signal
from rewards_for_tests import varied

CALLS = 0

def dies_once(prompts, responses):
    global CALLS
    CALLS += 1
    once = pathlib.Path("died")
    if CALLS == 3 and os.environ["RANK"] == "1" and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return varied(prompts, responses)
"""


def test_a_run_that_torchrun_starts_again_ends_as_an_unbroken_one(workplace, tiny_model):
    Path("dying.py").write_text(DIES_ONCE)
    flags = ["--model", tiny_model, "--prompts_per_update", "8", "--prompts_per_minibatch", "4", "--updates", "4"]
    flags += ["--learning_rate", "1e-2", "--save_every", "1", "--resume", "--max_response_tokens", "6"]
    flags += ["--prompts", "prompts.jsonl"]
    whole = launch("p3o.py", *flags, "--reward", "rewards_for_tests:varied", "--output_dir", "whole")
    assert whole.returncode == 0, whole.stderr
    broken = launch(
        "p3o.py", *flags, "--reward", "dying:dies_once", "--output_dir", "run", options=("--max-restarts", "1")
    )
    assert broken.returncode == 0, broken.stderr
    assert Path("died").exists()
    assert "resuming after update 2, from run/state/step-000002" in broken.stdout
    assert metrics("run") == metrics("whole")
    assert_equal(weights("run"), weights("whole"))
    # What two processes wrote, one reads.
    alone = launch(
        "p3o.py", *flags, "--updates", "5", "--reward", "dying:dies_once", "--output_dir", "run", processes=1
    )
    assert alone.returncode == 0, alone.stderr
    assert "resuming on another number of processes: 2 before, 1 now" in alone.stdout
    assert [line["step"] for line in metrics("run")] == [1, 2, 3, 4, 5]


STOPS_TWICE = """
import os, pathlib, signal
from rewards_for_tests import varied

def stops_twice(prompts, responses):
    if os.environ["RANK"] == "1":
        calls = pathlib.Path("calls")
        count = len(calls.read_text()) if calls.exists() else 0
        calls.write_text("x" * (count + 1))
        if count == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        if count == 4:
            # As Ctrl-C on a terminal, or scancel; torchrun then sends it to its workers once more.
            os.killpg(0, signal.SIGTERM)
    return varied(prompts, responses)
"""


def test_a_signal_to_one_process_or_all_stops_where_the_run_can_go_on(workplace, tiny_model):
    Path("stopping.py").write_text(STOPS_TWICE)
    flags = ["--model", tiny_model, "--prompts_per_update", "8", "--prompts_per_minibatch", "4", "--updates", "4"]
    flags += ["--learning_rate", "1e-2", "--resume", "--max_response_tokens", "6", "--prompts", "prompts.jsonl"]
    flags += ["--reward", "stopping:stops_twice"]
    for signal, update in (("SIGUSR1", 2), ("SIGTERM", 3)):
        stopped = launch("p3o.py", *flags, "--output_dir", "run")
        assert stopped.returncode != 0
        assert f"{signal}: stopped after update {update}; --resume goes on from there" in stopped.stdout
    for folder in ("run", "whole"):
        done = launch("p3o.py", *flags, "--output_dir", folder)
        assert done.returncode == 0, done.stderr
    assert metrics("run") == metrics("whole")
    assert_equal(weights("run"), weights("whole"))
