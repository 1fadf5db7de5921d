"""What an update computes once, on the pretended device: launches that neither long responses nor layers multiply."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fastp3o.models.packed_model import PackedModel
from fastp3o.models.reference import MovingReference, SecondModel
from fastp3o.objectives.ppo import estimate_advantages, whiten
from tests.simulated_cuda.host import Record, recorded, write_counts

DEVICE = torch.device("cuda")
# Launches of a doubling of the terms, and of all else.
DOUBLING, BESIDE = 4, 10


@pytest.mark.parametrize(("longest", "doublings"), [(8, 3), (100, 7), (1024, 10)])
def test_advantages_of_ppo_double_their_terms_with_each_pass(longest, doublings):
    lengths = [longest, 1, longest // 2]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE)
    rewards, values = torch.randn(2, sum(lengths)).to(DEVICE)
    with recorded() as record:
        estimate_advantages(rewards, values, cu_seqlens, longest, gae_lambda=0.95)
    assert record.launches.total() <= BESIDE + DOUBLING * doublings, record.table()
    write_counts(f"advantages of PPO, at most {longest} tokens", {"launches": record.launches.total()})
    with recorded() as whitening:
        whiten([rewards, values], lambda sums: sums)
    assert not record.waits + whitening.waits, record.table()


def model(layers: int, dtype: torch.dtype) -> PackedModel:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    return PackedModel(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers)).to(dtype))


def following(layers: int, dtype: torch.dtype, decay: float, *, offload: bool = False) -> Record:
    policy = model(layers, dtype).to(DEVICE)
    second = SecondModel(model(layers, dtype), DEVICE, offload=offload)
    moving = MovingReference(second, every=0 if decay else 1, decay=decay)
    with recorded() as record:
        moving.follow(policy, 1)
    return record


@pytest.mark.parametrize(("dtype", "decay"), [(torch.float32, 0.0), (torch.float32, 0.9), (torch.float16, 0.9)])
def test_a_reference_follows_in_three_launches_a_weight_and_waits_for_nothing(dtype, decay):
    record = following(2, dtype, decay)
    write_counts(f"reference in {dtype}, decay {decay}", {"launches": record.launches.total()})
    assert not record.waits, record.table()
    assert record.launches.total() <= 3 * len(list(model(2, dtype).parameters()))
    waits = following(2, dtype, 0.9, offload=True).waits
    assert len(waits) == len(list(model(2, dtype).parameters())), "an offloaded one waits once a weight"
