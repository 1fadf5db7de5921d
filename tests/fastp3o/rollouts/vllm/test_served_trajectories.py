"""Environments whose turns servers sample, against the engine's rounds of turns."""

import threading
import time
from functools import partial
from pathlib import Path

import pytest

from fastp3o.endpoint import EndpointError
from fastp3o.named_function import FunctionError
from fastp3o.training.loop import train
from tests.fastp3o.rollouts.test_trajectories import SETTINGS, AsyncEcho, Echo
from tests.fastp3o.rollouts.vllm.stand_in import StandIn, served_by, standing_in
from tests.fastp3o.rollouts.vllm.test_served_runs import assert_close, run, train_like_servers
from tests.fastp3o.runs import assert_equal, config, copy_at_save_before, metrics, weights
from tests.fastp3o.training.test_distributed import furthest

GAME = SETTINGS | {"environment": "games:Echo", "reward": "environment", "updates": 3, "max_response_tokens": 14}


class Greets(AsyncEcho):
    """Begins with an observation, and answers the second trajectories of prompts late."""

    def reset(self, prompt):
        super().reset(prompt)
        return f"{len(prompt)}?"


class Long(Echo):
    """Three turns."""

    def step(self, text):
        self.turns += 1
        return "[", {"turns": 1, "even": 0.1 * len(text)}, self.turns == 3


class HangsLater(Echo):
    """Its third round never answers."""

    games = 0

    def reset(self, prompt):
        super().reset(prompt)
        type(self).games += 1

    def step(self, text):
        if self.games > 2 * 16:
            time.sleep(600)
        return super().step(text)


class RaisesLater(HangsLater):
    games = 0

    def step(self, text):
        if self.games > 2 * 16 and "--" not in text:
            raise ValueError("the game is lost")
        return Echo.step(self, text)


@pytest.fixture
def games(workplace: Path) -> Path:
    names = "Echo, Greets, Long, HangsLater, RaisesLater"
    (workplace / "games.py").write_text(f"from {__name__} import {names}\n")
    return workplace


def game(tiny_model, folder, *servers, **changes):
    return config(tiny_model, folder, **GAME | (served_by(*servers) if servers else {}) | changes)


def turn_of(server, body):
    """The turn of `Long` that a request asks for."""
    return 1 + server.tokenizer.decode(body["prompt"]).count("[")


def asked(server):
    return [body for path, body in server.requests if path == "/v1/completions" and body["max_tokens"] <= 4]


@pytest.mark.parametrize("environment", ["Echo", "Greets"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_trajectories_from_two_servers_are_the_engines(games, tiny_model, monkeypatch, environment, ahead):
    changes = {"environment": f"games:{environment}", "rounds_ahead": ahead, "eval_prompts": "prompts.jsonl"}
    train_like_servers(monkeypatch, game(tiny_model, "engine", **changes))
    with standing_in(tiny_model) as first, standing_in(tiny_model) as second:
        train(game(tiny_model, "served", first, second, **changes))
    assert_close("engine", "served")
    lines = metrics("served")
    assert all(line["turns"] > 1 and line["observation_tokens"] > 0 for line in lines)
    assert [line.get("staleness", 0) for line in lines] == [0, ahead, ahead]
    assert all(("probe_gap" in line) == bool(ahead) for line in lines)
    for server in (first, second):
        # Weights go once an update, whatever the number of turns.
        assert server.paths().count("/collective_rpc") == 4 - ahead
    # A request for all first turns of a prompt, and one for each later turn, to the server that had the one before.
    contexts = {
        server.url: {tuple(body["prompt"]) for body in asked(server) if body["n"] == 2} for server in (first, second)
    }
    later = [(server.url, body) for server in (first, second) for body in asked(server) if body["n"] == 1]
    grown = [(url, body) for url, body in later if any(tuple(body["prompt"][: len(c)]) == c for c in contexts[url])]
    assert len(later) > 20
    assert len(grown) >= len(later) - 3 * 8  # but those of evaluations, which have one response
    # No request reaches beyond the room that is left.
    assert {body["max_tokens"] for _, body in later} > {4}


def test_a_trajectory_goes_on_while_another_waits_for_its_server(games, tiny_model):
    later, released = [], threading.Event()
    with standing_in(tiny_model) as fast, standing_in(tiny_model) as slow:

        def complete(body, server):
            if body["max_tokens"] <= 4:
                later.append(turn_of(server, body))
                if server is slow:
                    assert released.wait(30.0)
                elif later.count(3) == 4:  # on the other server's first turns nothing waits
                    released.set()
            return StandIn.complete(server, body)

        slow.complete, fast.complete = partial(complete, server=slow), partial(complete, server=fast)
        train(game(tiny_model, "run", fast, slow, updates=1, max_response_tokens=24, environment="games:Long"))
    assert released.is_set()


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_server_that_dies_in_the_third_turn_loses_nothing(games, tiny_model, ahead):
    changes = {"rounds_ahead": ahead, "environment": "games:Long", "max_response_tokens": 24}
    with standing_in(tiny_model) as server:
        train(game(tiny_model, "whole", server, **changes))
    with standing_in(tiny_model) as server:

        def complete(body):
            if turn_of(server, body) == 3 and server.paths().count("/collective_rpc") == 2:
                server.fault = "dead"
            return StandIn.complete(server, body)

        server.complete = complete
        with pytest.raises(EndpointError, match=f"update {2 + ahead}: .*does not answer.*--resume goes on"):
            train(game(tiny_model, "run", server, **changes))
    assert [line["step"] for line in metrics("run")] == [1, 2][: 1 + ahead]
    with standing_in(tiny_model) as server:
        train(game(tiny_model, "run", server, resume=True, **changes))
    assert [line.get("staleness") for line in metrics("run")] == ([0, 1, 0] if ahead else [None] * 3)
    if not ahead:  # a lost round that was sampled ahead comes from newer weights
        assert_equal(weights("whole"), weights("run"))


def test_a_run_with_servers_and_rounds_ahead_resumes_to_the_bit(games, tiny_model):
    ahead = {"rounds_ahead": 1, "save_minutes": 1e-9, "environment": "games:Greets"}
    with standing_in(tiny_model) as server:
        train(game(tiny_model, "run", server, **ahead))
        copy_at_save_before("run", "resumed")
        train(game(tiny_model, "resumed", server, resume=True, **ahead))
    assert_equal(weights("run"), weights("resumed"))
    assert [line["turns"] for line in metrics("run")] == [line["turns"] for line in metrics("resumed")]


@pytest.mark.parametrize(
    ("environment", "says"),
    [("HangsLater", r"update 3: .*has not returned after 0.5 s"), ("RaisesLater", "update 3: .*the game is lost")],
)
def test_an_environment_that_fails_ahead_ends_the_run_with_its_state(games, tiny_model, environment, says):
    ahead = {"rounds_ahead": 1, "environment_timeout": 0.5, "environment": f"games:{environment}"}
    began = time.monotonic()
    with standing_in(tiny_model) as server, pytest.raises(FunctionError, match=says):
        train(game(tiny_model, "run", server, **ahead))
    assert time.monotonic() - began < 60
    assert (Path("run/state/step-000002")).is_dir()


@pytest.mark.parametrize("sampler", ["served", "engine"])
def test_processes_whose_trajectories_have_other_numbers_of_turns_train_what_one_does(games, tiny_model, sampler):
    """Weights are spread over the processes, which meet at the beginning and at the end of a call."""
    flags = {name: value for name, value in GAME.items() if name != "stop_strings"}
    flags |= {"stop_strings": '["a", "e", "i", "o", " "]', "rounds_ahead": 1, "responses_per_prompt": 2}
    for processes in (1, 2):
        with standing_in(tiny_model) as first, standing_in(tiny_model) as second:
            engine = {"sampler": "engine"} | dict.fromkeys(("vllm_url", "vllm_time_limit"))
            changes = flags | ({} if sampler == "served" else engine)
            done = run(f"run{processes}", tiny_model, first, second, processes=processes, **changes)
            assert done.returncode == 0, done.stdout
    assert furthest("run1", "run2") < 1e-4
    assert [line["turns"] for line in metrics("run1")] == [line["turns"] for line in metrics("run2")]
