"""What vLLM's engine for NCCL is given. NCCL itself needs GPUs, and nobody has run it."""

from typing import NamedTuple

import pytest
import torch
from accelerate import Accelerator

from fastp3o.config import TrainableConfig
from fastp3o.errors import UserError
from fastp3o.models.loading import load_policy
from fastp3o.models.trainable import choose_trainable, whole_weights
from fastp3o.rollouts.vllm.nccl_transfer import NCCLTransfer, Weights
from fastp3o.rollouts.vllm.servers import Servers


class Described(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_weights_are_as_they_are_described(tiny_model, lora_rank):
    policy = load_policy(tiny_model)
    choose_trainable(policy, TrainableConfig(lora_rank=lora_rank))
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    source = Weights(policy, torch.bfloat16, Described)
    sent = list(source)
    assert [Described(name, weight.dtype, tuple(weight.shape)) for name, weight in sent] == source.metadata()
    expected = whole_weights(policy.model, torch.bfloat16, None)
    # A tied weight goes once.
    assert {name for name, _ in sent} == expected.keys() - {"lm_head.weight"}
    for name, weight in sent:
        assert torch.equal(weight, expected[name].bfloat16()), name


def test_it_is_refused_without_a_gpu(tiny_model):
    servers = Servers(["http://localhost:1"], requests=1, time_limit=1.0)
    with pytest.raises(UserError, match="--vllm_transfer nccl needs GPUs on both sides"):
        NCCLTransfer(Accelerator(cpu=True), load_policy(tiny_model), torch.float32, servers)
