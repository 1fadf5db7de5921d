"""Models that two processes share, against the same in one. `sharded_process.py` is what each of the two runs."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh

from fastp3o.config import StageConfig
from fastp3o.models import sharding
from fastp3o.models.sharding import process_mesh, whole
from fastp3o.optimizer import Optimizer
from fastp3o.precision import choose_precision
from tests.fastp3o.backward import scaled_backward
from tests.fastp3o.models.sharded_process import CPU, ROWS, compute_loss, go_on, optimizer_for, step, tied
from tests.fastp3o.together import together


def run_two(folder: Path, *arguments: str) -> dict:
    done = together(Path(__file__).with_name("sharded_process.py"), str(folder / "results"), *arguments)
    assert done.returncode == 0, done.stdout
    return torch.load(folder / "results", weights_only=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict:
    return run_two(folder)


def test_gradients_are_those_of_one_process(results):
    assert {name for name, error in results["errors"].items() if not error < 1e-6} == set()


@pytest.mark.nightly
def test_so_are_those_of_compiled_layers(tmp_path):
    errors = run_two(tmp_path, "compiled")["errors"]
    assert len(errors) == 2
    assert max(errors.values()) < 1e-6


def test_the_head_is_gathered_once_a_pass_whatever_chunks_its_logits_take(results):
    # Two layers and the rest, which stays for the backward pass; and the gradients of each.
    assert results["collectives"] == [[3 + 2, 3]] * 2


@pytest.mark.parametrize("what", ["copied", "offloaded", "gone after use"])
def test_other_uses_of_a_model_have_the_same_bits_and_give_their_memory_back(results, what):
    assert results[what]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 3e-6), ("fp16", 1e-3)])
def test_a_state_of_two_processes_goes_on_in_one(folder, results, precision, tolerance):
    optimizer = optimizer_for(precision)
    go_on(optimizer, folder / "states" / precision)
    step(optimizer)
    assert optimizer.parameters.keys() == results["resumed"][precision].keys()
    for name, expected in results["resumed"][precision].items():
        torch.testing.assert_close(optimizer.parameters[name].detach(), expected, atol=tolerance, rtol=0.0)


def test_a_gradient_that_overflows_in_one_process_is_left_out_by_all(results):
    for skipped, scales, moves in results["overflowed"]:
        assert skipped
        assert scales == [2.0] * 2
        assert moves


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_mesh_of_one_has_the_bits_of_none(group_of_one, precision):
    assert process_mesh(CPU) is None
    moved = []
    for mesh in (None, init_device_mesh("cpu", (1,))):
        config = StageConfig(model="", output_dir="", learning_rate=1e-2)
        optimizer = Optimizer(Accelerator(cpu=True), tied(), choose_precision(precision, "fp32"), config, 9, mesh=mesh)
        for _ in range(3):
            losses = []
            for row in ROWS:
                losses.append(compute_loss(optimizer.model, row))
                scaled_backward(optimizer, losses[-1])
            optimizer.step(losses[-1].detach())
        moved.append([*losses, *(whole(parameter) for parameter in optimizer.parameters.values())])
    assert all(torch.equal(*both) for both in zip(*moved, strict=True))


def test_processes_are_one_group_or_several(monkeypatch):
    monkeypatch.setattr(sharding, "number_of_processes", lambda: 6)
    monkeypatch.setattr(sharding, "init_device_mesh", lambda device, shape, **names: shape)
    assert [process_mesh(CPU), process_mesh(CPU, 6), process_mesh(CPU, 2)] == [(6,), (6,), (3, 2)]
    with pytest.raises(ValueError, match=r"--shard_size \(4\) must divide"):
        process_mesh(CPU, 4)
