from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fastp3o.packing.packed_row import ALIGNMENT, OnDevice, to_device, upload
from tests.fastp3o.models.model_families import PAIRS

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Nested(OnDevice):
    parts: tuple[Tensor | None, ...]
    named: dict[str, Tensor]
    number: int


def all_kinds() -> list[Tensor]:
    return [
        torch.arange(5),
        torch.tensor([True, False, True]),
        torch.empty(0, 3, dtype=torch.int32),
        torch.tensor(2.5),
        torch.randn(4, 6).T,
        torch.randn(3).bfloat16(),
    ]


def test_what_is_on_its_device_stays_as_it_is():
    tensors = all_kinds()
    value = Nested((tensors[0], None, tensors[1]), {"other": tensors[3]}, 7)
    moved = to_device((value, {"table": tensors[4]}), CPU)
    assert moved == (value, {"table": tensors[4]})
    assert moved[0].parts[0] is tensors[0]


def test_tensors_of_every_kind_arrive_in_one_aligned_copy(monkeypatch):
    empty, tensors = torch.empty, all_kinds()
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory, **options: empty(*sizes, **options))
    arrived = upload(tensors, CPU)
    assert len({tensor.untyped_storage().data_ptr() for tensor in arrived}) == 1
    for tensor, before in zip(arrived, tensors, strict=True):
        assert tensor.dtype == before.dtype
        assert torch.equal(tensor, before)
        assert tensor.storage_offset() * tensor.itemsize % ALIGNMENT == 0


@pytest.mark.gpu
def test_a_row_arrives_on_the_gpu(device):
    row = PAIRS.row()
    there = row.to(device)
    assert there.labels.is_cuda
    assert there.segments.cu_keys.is_cuda
    assert torch.equal(there.input_ids.cpu(), row.input_ids)
    assert torch.equal(there.cu_seqlens.cpu(), row.cu_seqlens)
    assert there.to(device).labels is there.labels
