"""Servers whose answers are no completions of the policy, or of another request."""

import pytest

from fastp3o.endpoint import EndpointError
from fastp3o.rollouts.vllm.servers import OtherWeightsError
from fastp3o.training.loop import train
from tests.fastp3o.rollouts.vllm import stand_in
from tests.fastp3o.rollouts.vllm.stand_in import StandIn, served_by
from tests.fastp3o.runs import assert_equal, config, metrics, weights


def beyond_the_vocabulary(choices):
    choices[0]["token_ids"][0] = 10**19
    return choices


FAULTS = {
    "token": (beyond_the_vocabulary, "has token 10000000000000000000, and the policy has 258 tokens"),
    "other prompt": (lambda choices: [choice | {"prompt_token_ids": [9]} for choice in choices], "another prompt"),
    "twice": (lambda choices: [choices[0], *choices[:-1]], "or one of them twice"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_answer_that_is_not_the_requests_ends_the_run_and_loses_nothing(fault, workplace, tiny_model, monkeypatch):
    change, message = FAULTS[fault]
    monkeypatch.setitem(stand_in.FAULTS, fault, change)
    refused = pytest.raises(EndpointError, match=f"update 2: .*{message}")
    with StandIn(tiny_model, fault=fault, from_completion=12) as server, refused:
        train(config(tiny_model, "run", **served_by(server)))
    with StandIn(tiny_model) as server:
        train(config(tiny_model, "run", resume=True, **served_by(server)))
        train(config(tiny_model, "whole", **served_by(server)))
    assert_equal(weights("whole"), weights("run"))


def test_a_server_that_loses_the_weights_after_its_probe_is_found_before_its_round_trains(workplace, tiny_model):
    """A round that is sampled ahead is trained an update later: the same probe again tells who sampled it."""
    ahead = {"rounds_ahead": 1, "updates": 4}
    with StandIn(tiny_model) as server:
        train(config(tiny_model, "whole", **served_by(server), **ahead))
        complete = server.complete

        def started_anew(body):
            if server.paths().count("/collective_rpc") == 2 and body["n"] == 2 and body["max_tokens"] == 6:
                server.load(tiny_model)
            return complete(body)

        server.requests.clear()
        server.complete = started_anew
        with pytest.raises(OtherWeightsError, match=r"update 3: .*has lost the policy's weights: was it started anew"):
            train(config(tiny_model, "run", **served_by(server), **ahead))
        server.complete = complete
        train(config(tiny_model, "run", resume=True, **served_by(server), **ahead))
    # The lost round is sampled anew, by the policy as it is now.
    assert metrics("run")[:2] == metrics("whole")[:2]
    assert [line["staleness"] for line in metrics("run")] == [0, 1, 0, 1]
