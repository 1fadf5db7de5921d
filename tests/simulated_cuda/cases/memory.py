"""The calculator's predictions beside the bytes that live on the pretended device, counted as CUDA's allocator does."""

import gc
from contextlib import nullcontext

import pytest
import torch
from accelerate import Accelerator

from fastp3o.models.packed_model import labelled_logprobs
from fastp3o.objectives.base import Microbatch
from fastp3o.objectives.p3o import P3O, P3OConfig
from fastp3o.precision import choose_precision
from fastp3o.training.memory import Lengths, Model, frozen_memory, update_memory
from fastp3o.training.optimizer import Optimizer
from tests.fastp3o.training.test_memory import random_model, random_row

# hidden, intermediate, key heads, layers, vocabulary; pairs, prompt, response.
SMALL = (128, 384, 2, 4, 512), (3, 60, 4)
PRECISIONS = ["fp32", "bf16-autocast", "bf16", "fp16"]


def sizes_of(model, *, trains: bool) -> Model:
    parameters = model.model.num_parameters()
    return Model.from_config(
        model.model.config, parameters, parameters if trains else 0, trained_layers=0, head_trains=trains
    )


def lengths_of(row) -> Lengths:
    return Lengths(row.tokens, sum(row.segments.key_lengths), len(row.labels))


DISAGREES = pytest.mark.xfail(strict=True, reason="the prediction is 11 to 16% above (reference in bf16: 11% below)")


@pytest.mark.parametrize(
    "checkpointing", [pytest.param(False, marks=DISAGREES), True], ids=["all activations", "checkpointing"]
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_update_takes_what_is_predicted_within_a_tenth(precision, checkpointing):
    precision = choose_precision(precision, "fp16")
    model_sizes, (P, prompt, response) = SMALL
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
    microbatch = Microbatch(row, torch.randn(P, 2).to(device), old, old, old, old, 1.0)
    # The first step makes the moments; the peak of the second has everything.
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16) if precision.autocast else nullcontext():
            loss, _ = objective.loss(model, microbatch)
        optimizer.backward(loss)
        measured = torch.cuda.max_memory_allocated() - before
        optimizer.step(loss.detach())
    predicted = update_memory(sizes_of(model, trains=True), lengths_of(row), precision, checkpointing=checkpointing)
    assert predicted.peak == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=DISAGREES)])
def test_a_reference_takes_what_is_predicted_within_a_tenth(precision):
    precision = choose_precision(precision, "fp16")
    model, row = random_model(*SMALL[0], precision), random_row(*SMALL[1], True)
    gc.collect()
    before = torch.cuda.memory_allocated()
    model, row = model.to("cuda"), row.to(torch.device("cuda", 0))
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        labelled_logprobs(model, row)
    predicted = frozen_memory(sizes_of(model, trains=False), lengths_of(row), precision)
    measured = torch.cuda.max_memory_allocated() - before
    assert predicted.peak == pytest.approx(measured, rel=0.1)
