"""Environments whose turns servers sample, against the engine's rounds of turns."""

import threading
from functools import partial
from pathlib import Path

import pytest

from fastp3o.calls.endpoint import EndpointError
from fastp3o.calls.function import FunctionError
from fastp3o.packing.seeds import derived_seed
from fastp3o.rollouts.vllm.publisher import PROBE_TOKENS
from fastp3o.training.loop import train
from fastp3o.training.rollout_buffer import RolloutBuffer
from tests.fastp3o.rollouts.environments import SETTINGS, HangsLater
from tests.fastp3o.rollouts.vllm.stand_in import StandIn, served_by
from tests.fastp3o.rollouts.vllm.test_served_runs import (
    INTERRUPTED,
    assert_close,
    run,
    train_like_servers,
)
from tests.fastp3o.runs import assert_equal, config, copy_at_save_before, metrics, weights
from tests.fastp3o.training.test_distributed import furthest

GAMES = "tests.fastp3o.rollouts.environments"
GAME = SETTINGS | {
    "environment": f"{GAMES}:Greets",
    "reward": "environment",
    "max_response_tokens": 14,
}


def game(tiny_model, folder, *servers, **changes):
    return config(tiny_model, folder, **GAME | (served_by(*servers) if servers else {}) | changes)


def turn_of(server, body):
    """The turn of `Long` that a request asks for; 0 for a probe's."""
    return 0 if body["max_tokens"] > 4 else 1 + server.tokenizer.decode(body["prompt"]).count("[")


@pytest.mark.parametrize("ahead", [0, 1])
def test_trajectories_from_two_servers_are_the_engines(workplace, tiny_model, monkeypatch, ahead):
    changes = {
        "rounds_ahead": ahead,
        "eval_prompts": "prompts.jsonl",
        "eval_responses_per_prompt": 3,
    }
    train_like_servers(monkeypatch, game(tiny_model, "engine", **changes))
    with StandIn(tiny_model) as first, StandIn(tiny_model) as second:
        train(game(tiny_model, "served", first, second, **changes))
    assert_close("engine", "served")
    assert all(line["turns"] > 1 for line in metrics("served"))
    assert [line.get("staleness", 0) for line in metrics("served")] == [0, ahead, ahead]
    assert all(("probe_gap" in line) == bool(ahead) for line in metrics("served"))
    alone = set()
    for server in (first, second):
        # Weights go once an update, whatever the number of turns.
        assert server.paths().count("/collective_rpc") == 4 - ahead
        asked = [
            body
            for path, body in server.requests
            if path == "/v1/completions" and body["max_tokens"] <= 4
        ]
        # One request has all first turns of a prompt; later ones go alone, where the turn before
        # went.
        together = [body["prompt"] for body in asked if body["n"] > 1]
        later = [body for body in asked if body["n"] == 1]
        assert len(together) == (3 + 2) * 4
        assert all(any(body["prompt"][: len(one)] == one for one in together) for body in later)
        alone |= {body["max_tokens"] for body in later}
    assert alone > {4}  # none asks for more than there is room for


def test_a_trajectory_goes_on_while_another_waits_for_its_server(workplace, tiny_model):
    turns, third = [], threading.Event()
    with StandIn(tiny_model) as fast, StandIn(tiny_model) as slow:

        def complete(body, server):
            turns.append(turn_of(server, body))
            if server is slow and turns[-1]:
                assert third.wait(30.0)
            elif turns.count(3) == 4:
                third.set()
            return StandIn.complete(server, body)

        slow.complete, fast.complete = (
            partial(complete, server=slow),
            partial(complete, server=fast),
        )
        train(
            game(
                tiny_model,
                "run",
                fast,
                slow,
                updates=1,
                max_response_tokens=24,
                environment=f"{GAMES}:Long",
            )
        )


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_server_that_dies_in_the_third_turn_loses_nothing(workplace, tiny_model, ahead):
    changes = {"rounds_ahead": ahead, "environment": f"{GAMES}:Long", "max_response_tokens": 24}
    with StandIn(tiny_model) as server:

        def complete(body):
            if turn_of(server, body) == 3 and server.paths().count("/collective_rpc") == 2:
                server.fault = "dead"
            return StandIn.complete(server, body)

        server.complete = complete
        with pytest.raises(
            EndpointError, match=f"update {2 + ahead}: .*does not answer.*--resume continues"
        ):
            train(game(tiny_model, "run", server, **changes))
    with StandIn(tiny_model) as server:
        train(game(tiny_model, "run", server, resume=True, **changes))
        if ahead:  # a lost round comes from newer weights
            assert [line["staleness"] for line in metrics("run")] == [0, 1, 0]
        else:
            train(game(tiny_model, "whole", server, **changes))
            assert_equal(weights("whole"), weights("run"))


@pytest.mark.parametrize("changes", [{}, GAME], ids=["responses", "trajectories"])
def test_responses_go_on_from_new_weights_while_training_goes_on(
    workplace, tiny_model, monkeypatch, changes
):
    """Those to a prompt of the third round are under way until the policy has trained."""
    interrupted, rounds, sample = [], {}, RolloutBuffer.__call__
    monkeypatch.setattr(
        RolloutBuffer, "__call__", lambda self, n: rounds.setdefault(n, sample(self, n))
    )
    with StandIn(tiny_model) as server:

        def complete(body):
            if body["seed"] == derived_seed(derived_seed(3, 3), 0):
                interrupted.append(body)
                return server.complete_in_halves(body, lambda: server.paths().count("/resume") == 2)
            # No round is there before that request is under way.
            server.changed.wait_for(lambda: interrupted or body["max_tokens"] == PROBE_TOKENS)
            return StandIn.complete(server, body)

        server.complete = complete
        changes = (
            changes | served_by(server) | INTERRUPTED | {"updates": 4, "old_logprobs": "sampler"}
        )
        train(config(tiny_model, "run", **changes))
    published = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"]
    assert [path for path in server.paths() if path != "/v1/completions"] == published * 2
    assert [step["staleness"] for step in metrics("run")] == [0, 1, 2, 2]
    (body,) = interrupted
    for response in rounds[3][0].responses:
        ids = response.ids[slice(*response.spans[0])]
        old, new = (
            server.raw_logprobs(body["prompt"], ids, server.policies[loaded]) for loaded in (1, 2)
        )
        assert max(abs(one - two) for one, two in zip(old, new, strict=True)) > 1e-3
        half = body["max_tokens"] // 2
        assert list(response.logprobs)[: len(ids)] == pytest.approx(
            old[:half] + new[half:], abs=1e-5
        )


def test_a_run_with_servers_and_rounds_ahead_resumes_to_the_bit(workplace, tiny_model):
    ahead = {"rounds_ahead": 1, "save_minutes": 1e-9}
    with StandIn(tiny_model) as server:
        train(game(tiny_model, "run", server, **ahead))
        copy_at_save_before("run", "resumed")
        train(game(tiny_model, "resumed", server, resume=True, **ahead))
    assert_equal(weights("run"), weights("resumed"))


def test_an_environment_that_works_elsewhere_meanwhile_changes_no_run(workplace, tiny_model):
    ahead = {
        "rounds_ahead": 1,
        "save_minutes": 1e-9,
        "eval_prompts": "prompts.jsonl",
        "report_to": "tensorboard",
    }
    runs = {"Greets": "run", "Elsewhere": "other"}
    with StandIn(tiny_model) as server:
        for name, folder in runs.items():
            train(game(tiny_model, folder, server, environment=f"{GAMES}:{name}", **ahead))
    assert Path.cwd() == workplace
    assert {path.name for path in Path("run").iterdir()} == {
        path.name for path in Path("other").iterdir()
    }
    assert_equal(weights("run"), weights("other"))


def test_an_environment_that_hangs_ahead_ends_the_run_with_its_state(workplace, tiny_model):
    ahead = {"rounds_ahead": 1, "environment_timeout": 0.5, "environment": f"{GAMES}:HangsLater"}
    HangsLater.begun = 0
    late = pytest.raises(FunctionError, match=r"update 3: .*has not returned after 0.5 s")
    with StandIn(tiny_model) as server, late:
        train(game(tiny_model, "run", server, **ahead))
    assert Path("run/state/step-000002").is_dir()


@pytest.mark.parametrize("sampler", ["vllm", "engine"])
def test_processes_whose_trajectories_have_other_numbers_of_turns_train_what_one_does(
    workplace, tiny_model, sampler
):
    """Weights are spread over the processes, which meet at the beginning and at the end of a call."""
    changes = GAME | {
        "stop_strings": '["a", "e", "i", "o", " "]',
        "rounds_ahead": 1,
        "environment": f"{GAMES}:Echo",
    }
    changes |= (
        {}
        if sampler == "vllm"
        else {"sampler": "engine", "vllm_url": None, "vllm_time_limit": None}
    )
    for processes in (1, 2):
        with StandIn(tiny_model) as first, StandIn(tiny_model) as second:
            done = run(f"run{processes}", tiny_model, first, second, processes=processes, **changes)
            assert done.returncode == 0, done.stdout
    assert furthest("run1", "run2") < 1e-4
    assert [line["turns"] for line in metrics("run1")] == [
        line["turns"] for line in metrics("run2")
    ]
