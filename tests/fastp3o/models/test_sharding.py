"""Models that two processes share, against the same in one. `sharded_process.py` is what each of the two runs."""

from pathlib import Path

import pytest
import torch

from fastp3o.models import sharding
from fastp3o.models.packed_model import PackedModel, labelled_logprobs
from fastp3o.models.sharding import process_mesh
from tests.fastp3o.models.model_families import FAMILIES, PAIRS, random_model
from tests.fastp3o.models.sharded_process import CPU
from tests.fastp3o.together import together


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    file = tmp_path_factory.mktemp("sharded") / "results"
    done = together(Path(__file__).with_name("sharded_process.py"), str(file))
    assert done.returncode == 0, done.stdout
    return torch.load(file, weights_only=True)


def test_gradients_are_those_of_one_process(results):
    assert results["errors"].keys() >= {*FAMILIES, "LoRA", "critic"}
    # Parts of a group are matrices of other shapes.
    errors = {name: error / (1e-5 if "parts" in name else 1e-6) for name, error in results["errors"].items()}
    assert {name: error for name, error in errors.items() if not error < 1} == {}


def test_a_gradient_that_overflows_in_one_process_is_left_out_by_all(results):
    """The scale is halved, and the next step moves something again."""
    assert results["overflowed"] == [(True, 2.0, True)] * 8


def test_weights_stay_in_their_file_until_they_are_spread(results):
    """Though the trial of the model and its buffers have the precision that was asked for."""
    assert results["as stored"] == [({torch.bfloat16}, True)] * 3
    stored, wide = (
        PackedModel(random_model("gemma3").bfloat16().to(dtype)) for dtype in (torch.bfloat16, torch.float32)
    )
    layer = stored.layers()[0]
    with torch.no_grad(), sharding.computed_in(torch.float32, stored):
        assert {weight.dtype for weight in layer.parameters()} == {torch.bfloat16}
        assert torch.equal(labelled_logprobs(stored, PAIRS.row()), labelled_logprobs(wide, PAIRS.row()))
    assert {weight.dtype for weight in stored.parameters()} == {torch.bfloat16}
    assert not layer._forward_hooks


def test_processes_are_one_group_or_several(monkeypatch):
    monkeypatch.setattr(sharding, "number_of_processes", lambda: 6)
    monkeypatch.setattr(sharding, "init_device_mesh", lambda device, shape, **names: shape)
    assert [process_mesh(CPU), process_mesh(CPU, 6), process_mesh(CPU, 2)] == [(6,), (6,), (3, 2)]
    with pytest.raises(ValueError, match=r"--shard_size \(4\) must divide"):
        process_mesh(CPU, 4)


def test_pinned_blocks_are_full(monkeypatch):
    """Sizes of Gemma-2-9B over 64; torch rounds each block to a power of two."""
    shapes = [(4000, 56), *42 * [(56, 56), *3 * [(56, 224)], (56,)], ()]
    tensors, blocks, empty = [torch.randn(shape).half() for shape in shapes], [], torch.empty
    expected = [tensor.clone() for tensor in tensors]
    monkeypatch.setattr(torch, "empty", lambda size, dtype, pin_memory: blocks.append(size) or empty(size, dtype=dtype))
    sharding.pin(tensors)
    assert all(map(torch.equal, tensors, expected))
    assert sum(1 << (size - 1).bit_length() for size in blocks) <= 1.05 * sum(tensor.nbytes for tensor in tensors)
