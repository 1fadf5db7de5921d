"""What an update computes once, on the pretended device: launches that neither long responses nor layers multiply."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fastp3o.models.packed_model import PackedModel
from fastp3o.models.reference import MovingReference, SecondModel
from fastp3o.objectives.ppo import estimate_advantages, whiten
from tests.simulated_cuda.record import Record, recorded, write_counts

DEVICE = torch.device("cuda")
# Launches of a doubling of the terms, and of all else.
DOUBLING, BESIDE = 4, 10


def advantages(longest: int) -> Record:
    lengths = [longest, 1, longest // 2]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE)
    rewards, values = torch.randn(2, sum(lengths)).to(DEVICE)
    with recorded() as record:
        estimate_advantages(rewards, values, cu_seqlens, longest, gae_lambda=0.95)
    return record


def test_advantages_of_ppo_double_their_terms_with_each_pass():
    for longest, doublings in ((8, 3), (100, 7), (1024, 10)):
        record = advantages(longest)
        write_counts(f"advantages of PPO, at most {longest} tokens", {"launches": record.launches.total()})
        assert not record.waits, record.table()
        assert record.launches.total() <= BESIDE + DOUBLING * doublings, record.table()


def test_whitening_waits_for_nothing():
    pieces = [torch.randn(5).to(DEVICE), torch.randn(3).to(DEVICE)]
    with recorded() as record:
        whiten(pieces, lambda sums: sums)
    assert not record.waits, record.table()


def model(layers: int, dtype: torch.dtype) -> PackedModel:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    return PackedModel(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers)).to(dtype))


def following(layers: int, dtype: torch.dtype, decay: float, *, offload: bool = False) -> Record:
    policy = model(layers, dtype).to(DEVICE)
    second = SecondModel(model(layers, dtype), DEVICE, offload=offload)
    before = {name: weight.detach().to("cpu", torch.float64) for name, weight in second.model.named_parameters()}
    moving = MovingReference(second, every=0 if decay else 1, decay=decay)
    with recorded() as record:
        moving.follow(policy, 1)
    for name, now in policy.named_parameters():
        expected = decay * before[name] + (1 - decay) * now.detach().to("cpu", torch.float64)
        moved = moving.weights[name].detach().to("cpu", torch.float64)
        torch.testing.assert_close(moved, expected, rtol=2e-3, atol=1e-6)
    return record


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_a_reference_follows_in_three_launches_a_weight_and_waits_for_nothing(dtype, decay):
    record = following(2, dtype, decay)
    write_counts(f"reference in {dtype}, decay {decay}", {"launches": record.launches.total()})
    assert not record.waits, record.table()
    assert record.launches.total() <= 3 * len(list(model(2, dtype).parameters()))


def test_an_offloaded_reference_waits_once_a_weight():
    assert len(following(2, torch.float16, 0.9, offload=True).waits) == len(list(model(2, torch.float16).parameters()))
