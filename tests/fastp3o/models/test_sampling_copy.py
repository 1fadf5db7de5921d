"""The copy that is sampled, of a model in one process. `test_sharding.py` copies models that are
spread over two.
"""

import pytest
import torch
from torch import nn

from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.models.sampling_copy import SamplingCopy, dithered
from tests.fastp3o.models.model_families import FAMILIES, PAIRS, adapted, random_model

CPU = torch.device("cpu")
ROW = PAIRS.row()


def rounded(model: PackedModel, dtype: torch.dtype) -> PackedModel:
    """Buffers stay: rounded rotary frequencies would move every position."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@torch.no_grad()
def logprobs(model: PackedModel) -> torch.Tensor:
    return labeled_logprobs(model, ROW)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_copy_in_half_precision_is_the_rounded_model_and_follows_it_in_place(family):
    model = PackedModel(random_model(family))
    sampled = SamplingCopy(model, CPU, torch.bfloat16)
    kept = list(sampled.model.parameters())
    for factor in (1.0, 1.1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        expected = PackedModel(random_model(family))
        expected.load_state_dict(before)
        with sampled.gathered(model):
            assert torch.equal(logprobs(sampled.model), logprobs(rounded(expected, torch.bfloat16)))
            assert sampled.model.model.dtype == torch.bfloat16
            assert all(
                ours is theirs
                for ours, theirs in zip(kept, sampled.model.parameters(), strict=True)
            )
        assert sampled.memory.untyped_storage().nbytes() == 0
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_merged(family):
    model = adapted(family)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    sampled = SamplingCopy(model, CPU, torch.float32, merges=True)
    assert [type(m) for m in sampled.model.modules()] == [
        type(m) for m in PackedModel(random_model(family)).modules()
    ]
    with sampled.gathered(model):
        torch.testing.assert_close(logprobs(sampled.model), logprobs(model), atol=2e-5, rtol=1e-5)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    # The model itself goes on with its adapters.
    assert (logprobs(model) - logprobs(PackedModel(random_model(family)))).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_adapters_are_not_rounded_off(dtype):
    """As after the first steps: what they add is less than half a step of half precision, so that
    rounding to the nearest number would leave the model without them.
    """
    model = adapted("llama")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=1e-5 if dtype == torch.float16 else 1e-4)
    sampled = SamplingCopy(rounded(model, dtype), CPU, dtype, merges=True)
    layer = model.model.base_model.layers[0].mlp.down_proj
    base, added = layer.base_layer.weight.float(), layer.get_delta_weight("default").float()
    copies = []
    for _ in range(2):
        with sampled.gathered(model):
            copies.append(
                sampled.model.model.base_model.layers[0].mlp.down_proj.weight.float().clone()
            )
    assert ((base + added).to(dtype).float() != base).float().mean() < 0.2
    # Random rounding errors have a mean of zero: along the adapter's own direction they cancel.
    along = ((copies[0] - base) * added).sum() / added.square().sum()
    assert 0.5 < along < 1.5
    assert torch.equal(*copies)
    # Errors are less than a step, and other layers have others.
    spacing = torch.finfo(dtype).eps * 2 ** (base + added).abs().log2().floor()
    assert ((copies[0] - base - added).abs() <= spacing).all()
    other = torch.rand(100, 100)
    assert not torch.equal(dithered(other, dtype, 1), dithered(other, dtype, 2))
