"""What else samples: two processes, generation, evaluations of preference training."""

from pathlib import Path

import pytest

from fastp3o.generate.config import GenerateConfig
from fastp3o.generate.loop import generate
from fastp3o.objectives.preferences import DPOConfig
from fastp3o.training import preferences as preference
from tests.fastp3o.rollouts.vllm.stand_in import served_by, standing_in
from tests.fastp3o.runs import metrics
from tests.fastp3o.together import together
from tests.fastp3o.training.test_distributed import FP32, ONLINE, furthest

RUNS = Path(__file__).parents[2] / "training" / "runs_of_a_process.py"


def run(folder: str, tiny_model: str, *servers, processes: int = 2, **changes):
    settings = served_by(*servers) | {"model": tiny_model, "output_dir": folder} | changes
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return together(RUNS, "+", "p3o.py", *ONLINE, *FP32, *flags, processes=processes)


def test_two_processes_with_two_servers_train_what_one_does(workplace, tiny_model):
    """Weights are spread over the processes, and no process holds them whole."""
    for processes in (1, 2):
        with standing_in(tiny_model) as first, standing_in(tiny_model) as second:
            ahead = {"rounds_ahead": 1, "updates": 3, "save_every": 1, "processes": processes}
            done = run(f"run{processes}", tiny_model, first, second, **ahead)
            assert done.returncode == 0, done.stdout
            assert first.paths().count("/collective_rpc") == 2
    assert furthest("run1", "run2") < 1e-5
    for one, two in zip(metrics("run1"), metrics("run2"), strict=True):
        for name in ("reward", "kl", "response_length", "staleness"):
            assert two[name] == pytest.approx(one[name], abs=1e-4)


def test_a_server_of_one_process_ends_both(workplace, tiny_model):
    """The second process asks the second prompts, which both servers share: all end with one message."""
    with standing_in(tiny_model, fault="cut", from_completion=2 + 8 + 2 + 3) as server:
        done = run("run", tiny_model, server)
    assert done.returncode != 0
    assert "update 2" in done.stdout
    assert "--resume goes on" in done.stdout
    assert "Traceback" not in done.stdout
    assert Path("run/state/step-000001").is_dir()


def test_generation_keeps_what_servers_sample(workplace, tiny_model):
    settings = {"prompts": "prompts.jsonl", "reward": "rewards_for_tests:varied", "rollout_batch_size": 3}
    settings |= {"model": tiny_model, "max_prompt_tokens": 32, "max_response_tokens": 6, "keep_unfinished": True}
    settings["temperature"] = 0.7  # at which no log-probs are needed
    with standing_in(tiny_model) as first, standing_in(tiny_model) as second:
        done = generate(GenerateConfig(output_dir="one", **settings, **served_by(first)))
        generate(GenerateConfig(output_dir="two", **settings, **served_by(first, second)))
    assert (done.prompts, done.responses) == (8, 64)
    assert Path("one/samples.jsonl").read_bytes() == Path("two/samples.jsonl").read_bytes()
    # The weights stay, so they go to each server once a run.
    assert first.paths().count("/collective_rpc") == 2
    assert second.paths().count("/collective_rpc") == 1


def test_evaluations_of_preference_training_are_of_the_weights_so_far(workplace, tiny_model):
    settings = {"train_data": "preferences.jsonl", "eval_prompts": "prompts.jsonl", "max_response_tokens": 8}
    settings |= {"model": tiny_model, "batch_size": 4, "epochs": 2, "eval_every": 2, "learning_rate": 1e-3}
    settings |= {"report_to": "none", "precision": "fp32", "output_dir": "run"}
    with standing_in(tiny_model) as server:
        preference.train(DPOConfig(**settings, **served_by(server)))
    evaluations = metrics("run", "eval.jsonl")
    assert evaluations[0]["kl"] == pytest.approx(0, abs=1e-4)
    assert abs(evaluations[-1]["kl"]) > 1e-3
    assert server.paths().count("/collective_rpc") == len(evaluations)
