"""What else samples: two processes, generation, win rates, evaluations of preference training."""

import json
from pathlib import Path

import pytest

from fastp3o.evaluation.win_rates import WinRateConfig, responses_of_all
from fastp3o.generate.config import GenerateConfig
from fastp3o.generate.loop import generate
from fastp3o.objectives.preferences import DPOConfig
from fastp3o.training import preferences as preference
from fastp3o.training.loop import train
from tests.fastp3o.rollouts.vllm.stand_in import standing_in
from tests.fastp3o.runs import config, metrics
from tests.fastp3o.together import together
from tests.fastp3o.training.test_distributed import FP32, ONLINE, furthest

RUNS = Path(__file__).parents[2] / "training" / "runs_of_a_process.py"


def flags(*servers) -> dict:
    urls = ",".join(server.url for server in servers)
    return {"sampler": "vllm", "vllm_url": urls, "vllm_time_limit": 60.0}


def test_two_processes_with_two_servers_train_what_one_does(workplace, tiny_model):
    """Weights are spread over the processes, and no process holds them whole."""
    ahead = ["p3o.py", *ONLINE, *FP32, "--model", tiny_model, "--rounds_ahead", "1"]
    ahead += ["--updates", "3", "--save_every", "1"]
    for processes in (1, 2):
        with standing_in(tiny_model) as first, standing_in(tiny_model) as second:
            given = [part for name, value in flags(first, second).items() for part in (f"--{name}", str(value))]
            done = together(RUNS, "+", *ahead, *given, "--output_dir", f"run{processes}", processes=processes)
            assert done.returncode == 0, done.stdout
            assert len([path for path in first.paths() if path == "/collective_rpc"]) == 2
    assert furthest("run1", "run2") < 1e-5
    for one, two in zip(metrics("run1"), metrics("run2"), strict=True):
        for name in ("reward", "kl", "response_length", "staleness"):
            assert two[name] == pytest.approx(one[name], abs=1e-4)


@pytest.mark.parametrize("fault", ["cut", "dead"])
def test_a_server_of_one_process_ends_both(workplace, tiny_model, fault):
    """The second process asks the second prompts, which both servers share: all end with one message."""
    run = ["p3o.py", *ONLINE, *FP32, "--model", tiny_model, "--output_dir", "run"]
    with standing_in(tiny_model, fault=fault, from_completion=2 + 8 + 2 + 3) as server:
        given = [part for name, value in flags(server).items() for part in (f"--{name}", str(value))]
        done = together(RUNS, "+", *run, *given, processes=2)
    assert done.returncode != 0
    assert "update 2" in done.stdout
    assert "--resume goes on" in done.stdout
    assert "Traceback" not in done.stdout
    assert Path("run/state/step-000001").is_dir()


def test_generation_needs_no_log_probs_of_a_server_at_its_temperature(workplace, tiny_model):
    """With almost no temperature all responses to a prompt are the most likely one."""
    settings = {"prompts": "prompts.jsonl", "reward": "rewards_for_tests:varied", "temperature": 1e-4}
    settings |= {"model": tiny_model, "max_prompt_tokens": 32, "max_response_tokens": 6, "keep_unfinished": True}
    with standing_in(tiny_model) as server:
        generate(GenerateConfig(output_dir="cold", **settings, **flags(server)))
    lines = [json.loads(line) for line in Path("cold/samples.jsonl").read_text().splitlines()]
    assert {len(set(line["responses"])) for line in lines} == {1}


def test_generation_keeps_what_servers_sample(workplace, tiny_model):
    with standing_in(tiny_model) as first, standing_in(tiny_model) as second:
        settings = {"prompts": "prompts.jsonl", "reward": "rewards_for_tests:varied", "rollout_batch_size": 3}
        settings |= {"model": tiny_model, "max_prompt_tokens": 32, "max_response_tokens": 6, "keep_unfinished": True}
        done = generate(GenerateConfig(output_dir="one", **settings, **flags(first)))
        generate(GenerateConfig(output_dir="two", **settings, **flags(first, second)))
    assert (done.prompts, done.responses) == (8, 64)
    assert Path("one/samples.jsonl").read_bytes() == Path("two/samples.jsonl").read_bytes()
    # The weights stay, so they go to each server once a run.
    assert first.paths().count("/collective_rpc") == 2
    assert second.paths().count("/collective_rpc") == 1


def test_win_rates_have_each_checkpoint_served_in_turn(workplace, tiny_model):
    train(config(tiny_model, "run", updates=2, learning_rate=3e-2))
    settings = {"prompts": "prompts.jsonl", "reward": "rewards_for_tests:varied", "max_response_tokens": 6}
    settings |= {"first": tiny_model, "second": "run/model", "max_prompt_tokens": 32}
    with standing_in(tiny_model) as server:
        first, second = responses_of_all(WinRateConfig(**settings, **flags(server)))
        again, _ = responses_of_all(WinRateConfig(**settings, **flags(server)))
    assert [group.responses for group in first.groups] == [group.responses for group in again.groups]
    assert [group.responses for group in first.groups] != [group.responses for group in second.groups]


def test_evaluations_of_preference_training_are_of_the_weights_so_far(workplace, tiny_model):
    settings = {"train_data": "preferences.jsonl", "eval_prompts": "prompts.jsonl", "max_response_tokens": 8}
    settings |= {"model": tiny_model, "batch_size": 4, "epochs": 2, "eval_every": 2, "learning_rate": 1e-3}
    with standing_in(tiny_model) as server:
        preference.train(DPOConfig(output_dir="run", report_to="none", precision="fp32", **settings, **flags(server)))
    evaluations = metrics("run", "eval.jsonl")
    assert evaluations[0]["kl"] == pytest.approx(0, abs=1e-4)
    assert abs(evaluations[-1]["kl"]) > 1e-3
    assert server.paths().count("/collective_rpc") == len(evaluations)
