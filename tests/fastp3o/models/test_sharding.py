"""Models that two processes share, against the same in one. `sharded_process.py` is what each of
the two runs.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import MixtralConfig

from fastp3o.models import sharding, tensor_parallel
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.models.sharding import process_mesh
from tests.fastp3o.models.model_families import (
    CONFIGS,
    FAMILIES,
    GROUPED,
    PAIRS,
    adapted,
    random_model,
)
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
    errors = {
        name: error / (1e-5 if "parts" in name else 1e-6)
        for name, error in results["errors"].items()
    }
    assert {name: error for name, error in errors.items() if not error < 1} == {}


def test_adapters_are_merged_as_in_one_process(results):
    assert results["merged"] == {
        "LoRA": True,
        "LoRA of experts": True,
        "LoRA of tied embeddings": True,
    }
    assert results["from adapter"]


def test_gradients_of_models_that_processes_cut_are_those_of_one(tmp_path):
    """On 2 x 2 processes, with vocabularies that two does not divide, tied embeddings and biases."""
    done = together(
        Path(__file__).with_name("cut_process.py"), str(tmp_path / "errors"), processes=4
    )
    assert done.returncode == 0, done.stdout
    errors = torch.load(tmp_path / "errors")
    # Gemma 3 adds up the gradients of its norms in fp32 in any precision.
    assert {
        name: error
        for name, error in errors.items()
        if not error < (1e-7 if name == "gemma3" else 1e-12)
    } == {}


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("gpt2", {}, "GPT2LMHeadModel: transformers has no plan for gpt2"),
        (
            "llama",
            {"num_key_value_heads": 1},
            "it has 1 num_key_value_heads, which 2 does not divide",
        ),
        ("llama", {"intermediate_size": 31}, "31 of layers.0.mlp.gate_proj, which 2 does not"),
        ("mixtral", {}, "its plan has moe_tp_experts for layers.0.mlp.experts"),
        ("llama", {"dropout": 0.1}, "dropout"),
        ("llama", {"compiled": True}, "--compile_layers"),
    ],
)
def test_what_cannot_be_cut_is_refused(monkeypatch, family, changes, says):
    monkeypatch.setitem(CONFIGS, "mixtral", lambda: MixtralConfig(**GROUPED, num_local_experts=2))
    monkeypatch.setattr(tensor_parallel, "parallelize_module", lambda *_: None)
    changes = {"num_key_value_heads": 2} | changes
    model = (
        adapted(family, **changes)
        if "dropout" in changes
        else PackedModel(random_model(family, **changes))
    )
    model.compiled = "compiled" in changes
    with pytest.raises(ValueError, match=says):
        tensor_parallel.cut(model, SimpleNamespace(size=lambda: 2))


def test_a_gradient_that_overflows_in_one_process_is_left_out_by_all(results):
    """The scale is halved, and the next step moves something again."""
    assert results["overflowed"] == [(True, 2.0, True)] * 8


def test_weights_stay_in_their_file_until_they_are_spread(results):
    """Though the trial of the model and its buffers have the precision that was asked for."""
    assert results["as stored"] == [({torch.bfloat16}, True)] * 3
    stored, wide = (
        PackedModel(random_model("gemma3").bfloat16().to(dtype))
        for dtype in (torch.bfloat16, torch.float32)
    )
    layer = stored.layers()[0]
    with torch.no_grad(), sharding.computed_in(torch.float32, stored):
        assert {weight.dtype for weight in layer.parameters()} == {torch.bfloat16}
        assert torch.equal(
            labeled_logprobs(stored, PAIRS.row()), labeled_logprobs(wide, PAIRS.row())
        )
    assert {weight.dtype for weight in stored.parameters()} == {torch.bfloat16}
    assert not layer._forward_hooks


def test_processes_are_one_group_or_several(monkeypatch):
    monkeypatch.setattr(sharding, "number_of_processes", lambda: 6)
    monkeypatch.setattr(sharding, "init_device_mesh", lambda device, shape, **names: shape)
    assert [process_mesh(CPU), process_mesh(CPU, 6), process_mesh(CPU, 2)] == [(6,), (6,), (3, 2)]
    assert [process_mesh(CPU, 0, 2), process_mesh(CPU, 1, 2), process_mesh(CPU, 0, 6)] == [
        (3, 2),
        (3, 1, 2),
        (1, 6),
    ]
    for sizes in ((4, 1), (2, 2), (1, 4)):
        with pytest.raises(
            ValueError, match=r"--shard_size x --tensor_parallel \({} x {}\) must".format(*sizes)
        ):
            process_mesh(CPU, *sizes)


def test_a_single_process_is_not_spread():
    assert process_mesh(CPU) is process_mesh(CPU, 1) is None
    for sizes in ((8, 1), (1, 2)):
        with pytest.raises(ValueError, match=r"must divide the number of processes \(1\)"):
            process_mesh(CPU, *sizes)


def test_pinned_blocks_are_full(monkeypatch):
    """Sizes of Gemma-2-9B over 64; torch rounds each block to a power of two."""
    shapes = [(4000, 56), *42 * [(56, 56), *3 * [(56, 224)], (56,)], ()]
    tensors, blocks, empty = [torch.randn(shape).half() for shape in shapes], [], torch.empty
    expected = [tensor.clone() for tensor in tensors]
    monkeypatch.setattr(
        torch,
        "empty",
        lambda size, dtype, pin_memory: blocks.append(size) or empty(size, dtype=dtype),
    )
    sharding.pin(tensors)
    assert all(map(torch.equal, tensors, expected))
    assert sum(1 << (size - 1).bit_length() for size in blocks) <= 1.05 * sum(
        tensor.nbytes for tensor in tensors
    )
