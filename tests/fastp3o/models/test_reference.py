from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.models.reference import MovingReference, SecondModel, WithoutAdapters
from fastp3o.models.sharding import FrozenModel
from fastp3o.packing.packed_row import PackedRow
from tests.fastp3o.models.model_families import FOURS, PAIRS, adapted, random_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_second_model_and_a_policy_without_adapters_agree_and_it_trains_on(family):
    rows = [PAIRS.row(), FOURS.row()]
    policy, model = adapted(family).train(), PackedModel(random_model(family)).train()
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        before = [labeled_logprobs(policy, row) for row in rows]
    second = SecondModel(model, CPU, offload=False)(rows)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    without = WithoutAdapters(policy)(rows)
    assert [len(logprobs) for logprobs in second] == [len(row.labels) for row in rows]
    assert all(torch.equal(*both) for both in zip(second, without, strict=True))
    assert not any(logprobs.requires_grad for logprobs in second + without)
    assert (before[0] - without[0]).abs().max() > 0.1
    with pytest.raises(AttributeError, match="missing"):
        WithoutAdapters(policy).map_rows(rows, lambda model, row: model.missing)
    after = [labeled_logprobs(policy, row) for row in rows]
    assert all(torch.equal(*both) for both in zip(before, after, strict=True))
    assert policy.training
    after[0].sum().backward()
    assert {
        name for name, parameter in policy.named_parameters() if parameter.grad is not None
    } == trained


@pytest.mark.parametrize("fails", [False, True])
def test_an_offloaded_model_is_copied_for_the_time_of_a_call_and_not_copied_back(
    monkeypatch, fails
):
    model = PackedModel(random_model("llama"))
    frozen = FrozenModel(model, CPU, None, offload=True)
    weight = model.model.lm_head.weight
    before = weight.data_ptr(), weight.clone()
    monkeypatch.setattr(Tensor, "to", lambda tensor, device, dtype, non_blocking: tensor.clone())

    def changes_the_copy(model: PackedModel, row: PackedRow) -> Tensor:
        copied = model.model.lm_head.weight
        assert copied.data_ptr() != before[0]
        copied.add_(1.0)
        if fails:
            raise RuntimeError("inside")
        return copied.mean()

    with pytest.raises(RuntimeError, match="inside") if fails else nullcontext():
        frozen.map_rows([PAIRS.row()], changes_the_copy)
    assert model.model.lm_head.weight is weight
    assert weight.data_ptr() == before[0]
    assert torch.equal(weight, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("every", "decay"), [(0, 0.75), (2, 0.0)])
def test_a_moving_reference_is_the_fp32_mean_of_policies_or_a_copy(dtype, every, decay):
    """A copy waits for its update."""
    policy, start = (PackedModel(random_model("llama").to(dtype)) for _ in range(2))
    moving = MovingReference(SecondModel(start, CPU, offload=False), every=every, decay=decay)
    expected = {
        name: parameter.detach().float().clone() for name, parameter in start.named_parameters()
    }
    for update in (1, 2):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn_like(parameter))
        moving.follow(policy, update)
        if not every or update == every:
            share = 1 - decay
            expected = {
                name: expected[name].lerp(p.float(), share) for name, p in policy.named_parameters()
            }
        assert all(
            torch.equal(parameter, expected[name].to(dtype))
            for name, parameter in start.named_parameters()
        )
