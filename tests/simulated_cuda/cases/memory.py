"""The calculator's predictions beside the bytes that live on the pretended device, counted as CUDA's allocator does."""

import gc
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from accelerate import Accelerator

from fastp3o.commands.predicted_memory import Lengths, Model, frozen_memory, rollout_memory, update_memory
from fastp3o.models.packed_model import labelled_logprobs
from fastp3o.objectives.base import Microbatch
from fastp3o.objectives.p3o import P3O, P3OConfig
from fastp3o.optimizer import Optimizer
from fastp3o.precision import choose_precision
from fastp3o.rollouts import engine as rollouts
from fastp3o.rollouts.cache import Room
from fastp3o.rollouts.engine import layer_shapes
from fastp3o_kernels.decoding import response_keys
from tests.fastp3o.backward import scaled_backward
from tests.scripts.test_memory import random_model, random_row

# hidden, intermediate, key heads, layers, vocabulary; pairs, prompt, response.
SMALL = (128, 384, 2, 4, 512), (3, 60, 4)
# Short rows and a head whose gradient is most of what they need.
LARGE_HEAD = (128, 384, 2, 2, 4096), (3, 60, 4)
PRECISIONS = ["fp32", "bf16-autocast", "bf16", "fp16"]


def sizes_of(model, *, trains: bool) -> Model:
    parameters = model.model.num_parameters()
    return Model.from_config(
        model.model.config, parameters, parameters if trains else 0, trained_layers=0, head_trains=trains
    )


def lengths_of(row) -> Lengths:
    return Lengths(row.tokens, sum(row.segments.key_lengths), len(row.labels))


@pytest.mark.parametrize(
    ("sizes", "precision", "checkpointing"),
    [*product([SMALL], PRECISIONS, [False, True]), (LARGE_HEAD, "fp16", False)],
)
def test_an_update_takes_what_is_predicted_within_a_tenth(sizes, precision, checkpointing):
    precision = choose_precision(precision, "fp16")
    model_sizes, (P, prompt, response) = sizes
    config = P3OConfig(model="", output_dir="", prompts="", reward="", precision=precision.name)
    objective, device = P3O(config), torch.device("cuda", 0)
    model, row = random_model(*model_sizes, choose_precision("fp32", "fp32")), random_row(P, prompt, response, True)
    if checkpointing:
        model.recompute_activations()
    gc.collect()
    before = torch.cuda.memory_allocated()
    optimizer = Optimizer(Accelerator(), model, precision, config, steps=2)
    row = row.to(device)
    old = torch.full((P, 2), -response * torch.tensor(float(model_sizes[-1])).log(), device=device)
    microbatch = Microbatch(row, torch.randn(P, 2).to(device), old, old, old, old)

    def add_gradients() -> None:
        with torch.autocast("cuda", torch.bfloat16) if precision.autocast else nullcontext():
            loss, _ = objective.loss(model, microbatch, P)
        scaled_backward(optimizer, loss)

    # The first step makes the moments. In the second, the row after the first finds gradients of everything.
    add_gradients()
    optimizer.step(torch.zeros((), device=device))
    add_gradients()
    stays = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    add_gradients()
    measured = torch.cuda.max_memory_allocated() - before
    sizes = sizes_of(model, trains=True)
    predicted = update_memory(sizes, lengths_of(row), precision, checkpointing=checkpointing)
    kept = sizes.parameters * precision.weights.itemsize
    kept += predicted.masters + predicted.gradients + predicted.optimizer
    assert kept == pytest.approx(stays, rel=0.01)
    assert predicted.peak - kept == pytest.approx(measured - stays, rel=0.1)


@pytest.mark.parametrize("precision", PRECISIONS[:3])
def test_a_reference_takes_what_is_predicted_within_a_tenth(precision):
    precision = choose_precision(precision, "fp16")
    model, row = random_model(*SMALL[0], precision), random_row(*SMALL[1], True)
    gc.collect()
    before = torch.cuda.memory_allocated()
    model, row = model.requires_grad_(False).to("cuda"), row.to(torch.device("cuda", 0))
    stays = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16) if precision.autocast else nullcontext():
        labelled_logprobs(model, row)
    predicted = frozen_memory(sizes_of(model, trains=False), lengths_of(row), precision)
    measured = torch.cuda.max_memory_allocated() - before
    assert predicted.weights == pytest.approx(stays, rel=0.01)
    assert predicted.peak - predicted.weights == pytest.approx(measured - stays, rel=0.1)


def test_rollouts_take_what_is_predicted_within_a_tenth(monkeypatch):
    precision = choose_precision("bf16", "fp16")
    # A step in the interpreter takes seconds, and no response is longer.
    monkeypatch.setattr(rollouts, "STEPS_PER_LOOK", 2)
    P, K, prompt, room = 16, 2, 128, Room(16, 127, 2, 32, 2)
    model = random_model(128, 384, 2, 2, 8192, precision).eval()
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = model.to("cuda")
    predicted = rollout_memory(sizes_of(model, trains=False), room, precision)
    with torch.no_grad():
        shapes = layer_shapes(model, 3)
        engine = rollouts.Engine(model, shapes, room, {0}, graph=False)
        torch.cuda.reset_peak_memory_stats()
        engine.run([[5] * prompt] * P, response_keys(0, torch.arange(P), K))
        measured = torch.cuda.max_memory_allocated() - before
        assert predicted.peak - predicted.weights == pytest.approx(measured - predicted.weights, rel=0.1)
        torch.cuda.reset_peak_memory_stats()
        engine.step()
    measured = torch.cuda.max_memory_allocated() - before
    assert predicted.cache + predicted.head == pytest.approx(measured - predicted.weights, rel=0.1)
