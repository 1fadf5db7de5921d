"""Servers whose answers are of other weights than the policy's."""

import pytest

from fastp3o.rollouts.groups import POLICY_ITSELF
from fastp3o.rollouts.vllm.servers import OtherWeightsError, Question, Servers, completion_settings
from fastp3o.training.loop import train
from tests.fastp3o.rollouts.vllm.stand_in import StandIn, served_by
from tests.fastp3o.runs import config, metrics


def test_what_a_lost_server_still_answers_is_asked_of_another(tiny_model):
    """It may have other weights by then."""
    with StandIn(tiny_model) as first, StandIn(tiny_model) as second:
        servers = Servers(
            [first.url, second.url], requests=1, time_limit=60.0, vocabulary=258, interrupts=True
        )
        first.complete = lambda body: servers.lost.add(first.url) or StandIn.complete(first, body)
        settings = completion_settings(POLICY_ITSELF, 1.0, 4, set()) | {"n": 1}
        assert [place for place, _ in servers.complete([Question(7, [5], 1)], settings, set())] == [
            7
        ]
    assert first.paths() == second.paths() == ["/v1/completions"]


def test_a_server_that_loses_the_weights_after_its_probe_is_found_before_its_round_trains(
    workplace, tiny_model
):
    """A round that is sampled ahead is trained an update later: the same probe again tells who
    sampled it.
    """
    ahead = {"rounds_ahead": 1, "updates": 4}
    with StandIn(tiny_model) as server:
        train(config(tiny_model, "whole", **served_by(server), **ahead))
        complete = server.complete

        def started_anew(body):
            if (
                server.paths().count("/collective_rpc") == 2
                and body["n"] == 2
                and body["max_tokens"] == 6
            ):
                server.load(tiny_model)
            return complete(body)

        server.requests.clear()
        server.complete = started_anew
        with pytest.raises(
            OtherWeightsError, match=r"update 3: .*has lost the policy's weights: was it restarted"
        ):
            train(config(tiny_model, "run", **served_by(server), **ahead))
        server.complete = complete
        train(config(tiny_model, "run", resume=True, **served_by(server), **ahead))
    # The lost round is sampled anew, by the policy as it is now.
    assert metrics("run")[:2] == metrics("whole")[:2]
    assert [line["staleness"] for line in metrics("run")] == [0, 1, 0, 1]
