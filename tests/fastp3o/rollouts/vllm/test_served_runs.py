"""Runs whose responses come from a server, or two, against the engine's."""

import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fastp3o.endpoint import EndpointError
from fastp3o.errors import UserError
from fastp3o.packing.pack import derived_seed
from fastp3o.rollouts import engine_sampler
from fastp3o.rollouts.vllm.publisher import IN_MEMORY
from fastp3o.rollouts.vllm.servers import OtherWeightsError
from fastp3o.run.signals import StoppedError
from fastp3o.training.loop import train
from tests.fastp3o.rollouts.vllm.stand_in import standing_in
from tests.fastp3o.runs import assert_equal, config, metrics, weights

response_keys = engine_sampler.response_keys
EVALUATED = {"eval_prompts": "prompts.jsonl", "eval_every": 2, "eval_limit": 4}


@pytest.fixture
def numbers_of_requests(monkeypatch):
    """The engine's own runs draw the random numbers of a server that is asked for one prompt at a time."""

    def keys(seed, numbers, count):
        return torch.cat([response_keys(derived_seed(seed, int(n)), torch.tensor([0]), count) for n in numbers])

    def draw(by_request: bool) -> None:
        monkeypatch.setattr(engine_sampler, "response_keys", keys if by_request else response_keys)

    return draw


def served(tiny_model, folder, *servers, **changes):
    urls = ",".join(server.url for server in servers)
    return config(tiny_model, folder, **{"sampler": "vllm", "vllm_url": urls, "vllm_time_limit": 30.0} | changes)


def assert_close(first: str, second: str, tolerance: float = 1e-4) -> None:
    for one, two in zip(metrics(first), metrics(second), strict=True):
        names = one.keys() - {"ratio/noise", "sampler_gap", "probe_gap"}
        assert {name: two[name] for name in names} == pytest.approx({name: one[name] for name in names}, abs=tolerance)
    for name, weight in weights(first).items():
        assert (weight - weights(second)[name]).abs().max() < tolerance


def no_weights_left() -> bool:
    return not list(IN_MEMORY.glob(f"fastp3o-weights-*-{os.getpid()}"))


LORA = {"lora_rank": 2, "learning_rate": 1e-2}


@pytest.mark.parametrize(
    "changes", [LORA, pytest.param({"old_logprobs": "sampler"}, marks=pytest.mark.nightly)], ids=str
)
def test_a_served_run_is_the_engines(workplace, tiny_model, numbers_of_requests, changes):
    numbers_of_requests(by_request=True)
    train(config(tiny_model, "engine", **EVALUATED, **changes))
    numbers_of_requests(by_request=False)
    with standing_in(tiny_model) as server:
        train(served(tiny_model, "served", server, **EVALUATED, **changes))
    assert_close("engine", "served")
    assert all(step["sampler_gap"] < 1e-4 for step in metrics("served"))
    for one, two in zip(metrics("engine", "eval.jsonl"), metrics("served", "eval.jsonl"), strict=True):
        assert two == pytest.approx(one, abs=1e-4)
    # Weights go once an update, and not for an evaluation of weights that the servers have.
    assert server.paths().count("/collective_rpc") == 5
    assert server.paths().count("/reset_prefix_cache") == 5
    assert no_weights_left()


def test_two_servers_share_the_prompts_and_change_nothing(workplace, tiny_model):
    with standing_in(tiny_model) as one:
        train(served(tiny_model, "one", one, updates=2))
    with standing_in(tiny_model) as first, standing_in(tiny_model, fault="reversed") as second:
        train(served(tiny_model, "two", first, second, updates=2))
    assert metrics("one") == metrics("two")
    assert_equal(weights("one"), weights("two"))
    shares = [sum(len(body["prompt"]) > 4 for _, body in s.requests if "prompt" in body) for s in (first, second)]
    assert shares == [8, 8]


def test_what_a_request_says_leaves_nothing_to_the_servers_files(workplace, tiny_model):
    with standing_in(tiny_model) as server:
        train(served(tiny_model, "run", server, updates=1))
    body = next(body for path, body in server.requests if path == "/v1/completions" and body["max_tokens"] == 6)
    assert body["ignore_eos"] is True
    assert body["stop_token_ids"] == [0]
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (1.0, 1.0, 0, 0.0)
    assert (body["repetition_penalty"], body["presence_penalty"], body["frequency_penalty"]) == (1.0, 0.0, 0.0)
    seeds = [body["seed"] for path, body in server.requests if "seed" in body]
    far_apart = sorted(seeds[-8:])
    assert min(b - a for a, b in pairwise(far_apart)) > 2**32


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("cut", "a response of 1 tokens, cut short: was the server started with a --max-model-len"),
        ("one too few", "which has 1 responses, and 2 were asked for"),
        ("without a log-prob", "without a log-prob of each"),
        ("aborted", "which was cut short"),
        ("dead", "does not answer"),
        ("off", "the servers' log-probs of responses are .* nats off the policy's own"),
    ],
)
def test_a_server_that_fails_within_a_round_ends_the_run_with_its_state(workplace, tiny_model, fault, says):
    # Probes ask for 2 prompts before updates 1 and 2; the second update's seventh prompt fails.
    with standing_in(tiny_model, fault=fault, from_completion=2 + 8 + 2 + 6) as server:
        with pytest.raises(EndpointError, match=rf"update 2: .*{says}.*--resume goes on") as failure:
            train(served(tiny_model, "run", server))
        assert "\n" not in str(failure.value)
    assert [step["step"] for step in metrics("run")] == [1]
    assert Path("run/state/step-000001").is_dir()
    assert no_weights_left()


@pytest.mark.nightly
@pytest.mark.parametrize("rounds_ahead", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_run_whose_server_died_goes_on_with_another(workplace, tiny_model, rounds_ahead):
    ahead = {"rounds_ahead": rounds_ahead, "updates": 3, "inner_epochs": 1}
    with standing_in(tiny_model, fault="dead", from_completion=24) as server, pytest.raises(EndpointError):
        train(served(tiny_model, "run", server, **ahead))
    assert 0 < len(metrics("run")) < 3
    with standing_in(tiny_model) as server:
        train(served(tiny_model, "run", server, resume=True, **ahead))
    with standing_in(tiny_model) as server:
        train(served(tiny_model, "whole", server, **ahead))
    names = ["step", "response_length", "kl", "loss"] if rounds_ahead == 0 else ["step"]
    assert [[step[n] for n in names] for step in metrics("run")] == [
        [step[n] for n in names] for step in metrics("whole")
    ]


def test_one_round_ahead_is_sampled_from_the_weights_before_each_update(workplace, tiny_model, numbers_of_requests):
    ahead = {"rounds_ahead": 1, **EVALUATED}
    numbers_of_requests(by_request=True)
    train(config(tiny_model, "engine", **ahead))
    numbers_of_requests(by_request=False)
    with standing_in(tiny_model) as server:
        train(served(tiny_model, "served", server, **ahead))
    assert_close("engine", "served")
    assert [step["staleness"] for step in metrics("served")] == [0, 1, 1, 1]
    assert all(0 <= step["probe_gap"] < 1e-4 for step in metrics("served"))
    # The policy moves by more than rounding between the update that samples and the one that trains.
    assert all(step["sampler_gap"] > 1e-3 for step in metrics("served")[1:])
    order = [path for path in server.paths() if path == "/collective_rpc" or path == "/v1/completions"]
    rounds = "".join("r" if path == "/collective_rpc" else "c" for path in order).split("r")[1:]
    # Probes ask for 2 prompts, rounds for 8, evaluations for 4. Weights go four times.
    assert [len(part) for part in rounds] == [2 + 4 + 8 + 8, 2 + 8, 2 + 4 + 8, 2 + 4]


@pytest.mark.nightly
def test_a_last_round_that_was_sampled_before_asks_the_servers_nothing(workplace, tiny_model):
    ahead = {"rounds_ahead": 1, "updates": 5, "inner_epochs": 1, "save_every": 1}
    interrupted = ahead | {"reward": "rewards_for_tests:fails_on_fifth_call"}
    with standing_in(tiny_model) as server:
        train(served(tiny_model, "whole", server, **ahead))
        with pytest.raises(StoppedError):
            train(served(tiny_model, "run", server, **interrupted))
    with standing_in(tiny_model) as server:
        train(served(tiny_model, "run", server, **interrupted, resume=True))
    assert not server.requests
    assert "probe_gap" in metrics("run")[3]
    assert "probe_gap" not in metrics("run")[4]
    assert_equal(weights("run"), weights("whole"))


def test_a_server_with_old_weights_is_found_one_round_ahead(workplace, tiny_model):
    stale = pytest.raises(OtherWeightsError, match=r"update 2: .* does not sample from the policy")
    with standing_in(tiny_model, fault="stale") as server, stale:
        train(served(tiny_model, "run", server, rounds_ahead=1))


def test_a_server_that_keeps_old_weights_ends_the_run_before_it_trains_on_them(workplace, tiny_model):
    stale = pytest.raises(OtherWeightsError, match=r"update 2: .* does not sample from the policy: its log-probs are")
    with standing_in(tiny_model, fault="stale") as server, stale:
        train(served(tiny_model, "run", server))
    assert [step["step"] for step in metrics("run")] == [1]


def test_a_late_answer_ends_the_run(workplace, tiny_model):
    late = r"no end of the answer within 0.7 s \(attempts: 2\)"
    with standing_in(tiny_model, fault="slow", from_completion=6) as server, pytest.raises(EndpointError, match=late):
        train(served(tiny_model, "run", server, vllm_time_limit=0.7))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"version": "0.29.1"}, "is vLLM 0.29, and 0.30 or newer is needed"),
        ({"room": 20}, "takes sequences of 20 tokens, and prompt and response may have 518"),
    ],
)
def test_a_server_that_cannot_serve_is_refused_before_anything_begins(workplace, tiny_model, options, says):
    with standing_in(tiny_model, **options) as server, pytest.raises(UserError, match=says):
        train(served(tiny_model, "run", server))
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("fault", "says"),
    [("no reload", "VLLM_SERVER_DEV_MODE=1"), ("busy", "it still answers requests of others")],
)
def test_a_server_that_takes_no_weights_ends_the_run(workplace, tiny_model, fault, says):
    with standing_in(tiny_model, fault=fault) as server, pytest.raises(EndpointError, match=says):
        train(served(tiny_model, "run", server))
    assert no_weights_left()


def test_a_killed_runs_weights_are_removed_by_the_next(workplace, tiny_model):
    Path("shared").mkdir()
    of_a_dead_process = Path("shared", f"fastp3o-weights-{os.uname().nodename}-{2**22 + 1}", "policy")
    of_this_machines_first = Path("shared", f"fastp3o-weights-{os.uname().nodename}-1")
    of_another_machine = Path("shared", "fastp3o-weights-elsewhere-5")
    for folder in (of_a_dead_process, of_this_machines_first, of_another_machine):
        folder.mkdir(parents=True)
    with standing_in(tiny_model) as server:
        train(served(tiny_model, "run", server, vllm_folder="shared", updates=1))
    assert {path.name for path in Path("shared").iterdir()} == {of_this_machines_first.name, of_another_machine.name}
