"""The calculator's predictions beside the bytes that live on the pretended device, counted as CUDA's allocator does."""

import gc

import pytest
import torch
from accelerate import Accelerator

from fastp3o.commands.predicted_memory import Lengths, Model, update_memory
from fastp3o.objectives.base import Microbatch
from fastp3o.objectives.p3o import P3O, P3OConfig
from fastp3o.optimizer import Optimizer
from fastp3o.precision import choose_precision
from tests.fastp3o.backward import scaled_backward
from tests.scripts.test_memory import DEEP_HALF, random_model, random_row


@pytest.mark.parametrize(
    ("precision", "checkpointing"), [("fp32", True), ("bf16-autocast", False), ("bf16", False), ("fp16", True)]
)
def test_an_update_takes_what_is_predicted_within_a_tenth(precision, checkpointing):
    precision = choose_precision(precision, "fp16")
    model_sizes, (P, prompt, response) = DEEP_HALF
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
        with torch.autocast("cuda", torch.bfloat16, enabled=precision.autocast is not None):
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
    parameters = model.model.num_parameters()
    sizes = Model.from_config(model.model.config, parameters, parameters, trained_layers=0, head_trains=True)
    lengths = Lengths(row.tokens, sum(row.segments.key_lengths), len(row.labels))
    predicted = update_memory(sizes, lengths, precision, checkpointing=checkpointing)
    kept = parameters * precision.weights.itemsize + predicted.masters + predicted.gradients + predicted.optimizer
    assert kept == pytest.approx(stays, rel=0.01)
    assert predicted.peak - kept == pytest.approx(measured - stays, rel=0.1)
