"""Weights over NCCL, which sockets stand in for, to servers of both versions of vLLM's transfer."""

import pytest

from fastp3o.training.loop import train
from tests.fastp3o.rollouts.vllm.stand_in_nccl import NCCLStandIn, install
from tests.fastp3o.rollouts.vllm.stand_in import served_by
from tests.fastp3o.runs import assert_equal, config, metrics, weights
from fastp3o.rollouts.vllm import nccl_transfer
import sys

@pytest.fixture(params=["0.32.0", "0.33.0"])
def version(request, monkeypatch):
    monkeypatch.setattr(nccl_transfer, "DEVICE", "cpu")
    install(request.param, lambda name, module: monkeypatch.setitem(sys.modules, name, module))
    return request.param


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_run_is_that_of_the_folder(workplace, tiny_model, version, lora_rank):
    changes = {"updates": 3, "lora_rank": lora_rank, "learning_rate": 1e-2}
    for name in ("folder", "nccl"):
        with NCCLStandIn(tiny_model, version=version, gpus=2) as first, NCCLStandIn(tiny_model, version=version) as second:
            train(config(tiny_model, name, **served_by(first, second), vllm_weights=name, **changes))
    assert metrics("folder") == metrics("nccl")
    assert_equal(weights("folder"), weights("nccl"))
    print(first.paths())
