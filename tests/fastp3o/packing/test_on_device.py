from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fastp3o.packing.packed_row import ALIGNMENT, OnDevice, to_device, upload
from tests.fastp3o.models.model_families import FOURS

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Nested(OnDevice):
    parts: tuple[Tensor | None, ...]
    named: dict[str, Tensor]
    number: int


def test_what_is_on_its_device_stays_as_it_is():
    tensor = torch.arange(5)
    value = Nested((tensor, None), {"other": torch.tensor(2.5)}, 7)
    moved = to_device((value, {"table": tensor}), CPU)
    assert moved == (value, {"table": tensor})
    assert moved[0].parts[0] is tensor


def test_tensors_of_every_kind_arrive_in_one_aligned_copy(monkeypatch):
    tensors = [
        torch.arange(5),
        torch.tensor([True, False, True]),
        torch.empty(0, 3, dtype=torch.int32),
        torch.tensor(2.5),
        torch.randn(4, 6).T,
        torch.randn(3).bfloat16(),
    ]
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory, **options: empty(*sizes, **options))
    arrived = upload(tensors, CPU)
    assert len({tensor.untyped_storage().data_ptr() for tensor in arrived}) == 1
    for tensor, before in zip(arrived, tensors, strict=True):
        assert tensor.dtype == before.dtype
        assert torch.equal(tensor, before)
        assert tensor.storage_offset() * tensor.itemsize % ALIGNMENT == 0


@pytest.mark.parametrize("name", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_tensor_of_a_row_moves_to_a_device(name, request):
    row = FOURS.row()
    there = row.to(request.getfixturevalue("device") if name == "cuda" else torch.device(name))
    repeats = [tensor for pair in there.segments.shared.repeats for tensor in pair]
    tensors = [there.input_ids, there.labels, there.cu_seqlens, there.segments.cu_keys, there.segments.shared.own]
    assert len(repeats) == 6
    assert all(tensor.device.type == name for tensor in [*tensors, *repeats])
    assert there.groups == row.groups
    assert torch.equal(there.cu_seqlens_on_host, row.cu_seqlens)
    if name == "cuda":
        assert torch.equal(there.input_ids.cpu(), row.input_ids)
        assert there.to(there.labels.device).labels is there.labels
