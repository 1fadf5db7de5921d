import pytest
import torch
from torch import Tensor

from fastp3o.models.packed_model import PackedModel, labelled_logprobs
from fastp3o.models.reference import SecondModel, WithoutAdapters
from fastp3o.packing.packed_row import PackedRow
from tests.fastp3o.models.model_families import FOURS, PAIRS, random_model
from tests.fastp3o.models.test_trainable import with_adapters

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_second_model_and_a_policy_without_adapters_agree(family):
    rows = [PAIRS.row(), FOURS.row()]
    policy = with_adapters(family)
    second = SecondModel(PackedModel(random_model(family)), CPU, offload=False)(rows)
    without = WithoutAdapters(policy)(rows)
    assert [len(logprobs) for logprobs in second] == [len(row.labels) for row in rows]
    assert all(torch.equal(*both) for both in zip(second, without, strict=True))
    assert not any(logprobs.requires_grad for logprobs in second + without)
    with torch.no_grad():
        adapted = [labelled_logprobs(policy, row) for row in rows]
    assert not any(torch.equal(*both) for both in zip(adapted, without, strict=True))


def test_a_policy_without_adapters_trains_on_afterwards():
    policy = with_adapters("llama").train()
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    WithoutAdapters(policy)([PAIRS.row()])
    assert policy.training
    labelled_logprobs(policy, PAIRS.row()).sum().backward()
    assert {name for name, parameter in policy.named_parameters() if parameter.grad is not None} == trained


def test_a_second_model_is_frozen():
    model = PackedModel(random_model("llama")).train()
    SecondModel(model, CPU, offload=False)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


class Moving(PackedModel):
    """Notes the devices that it moves to, and the one on which it is called."""

    def __init__(self, model):
        self.__dict__["moves"] = []
        super().__init__(model)

    def to(self, device):
        self.moves.append(str(device))
        return self

    def forward(self, *args):
        self.moves.append("called")
        return super().forward(*args)


def test_offloading_moves_the_model_for_the_time_of_a_call():
    there = torch.device("cuda", 0)  # never touched
    model = Moving(random_model("llama"))
    reference = SecondModel(model, there, offload=True)
    reference([PAIRS.row(), FOURS.row()])
    assert model.moves == ["cpu", "cuda:0", "called", "called", "cpu"]

    def fails(model: PackedModel, row: PackedRow) -> Tensor:
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        reference.frozen.map_rows([PAIRS.row()], fails)
    assert model.moves[5:] == ["cuda:0", "cpu"]


def test_without_offloading_it_stays_on_the_device():
    model = Moving(random_model("llama"))
    SecondModel(model, CPU, offload=False)([PAIRS.row()])
    assert model.moves == ["cpu", "called"]


@pytest.mark.gpu
def test_an_offloaded_reference_computes_on_the_gpu_and_waits_on_the_cpu(device):
    model = PackedModel(random_model("llama"))
    (expected,) = SecondModel(model, CPU, offload=False)([PAIRS.row()])
    (got,) = SecondModel(model, device, offload=True)([PAIRS.row().to(device)])
    assert got.is_cuda
    assert not any(parameter.is_cuda for parameter in model.parameters())
    torch.testing.assert_close(got.cpu(), expected, atol=1e-4, rtol=1e-4)
