"""Writes the memory that one of two processes sharing a model allocates in an update, and its prediction, as JSON.

memory_of_a_process.py RESULTS CASE ...
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator

from fastp3o.commands.predicted_memory import Lengths, Model, sharded, update_memory
from fastp3o.config import StageConfig
from fastp3o.models.sharding import process_mesh
from fastp3o.objectives.base import Microbatch
from fastp3o.optimizer import Optimizer
from fastp3o.precision import choose_precision
from tests.fastp3o.backward import scaled_backward
from tests.scripts.test_memory import DEEP, DEEP_HALF, LARGE_HEAD, OBJECTIVE, WIDE, random_model, random_row

CASES = {
    "deep": (DEEP, "fp32"),
    "wide": (WIDE, "fp32"),
    "large head": (LARGE_HEAD, "fp32"),
    "deep, bf16": (DEEP_HALF, "bf16"),
    "wide, bf16": (WIDE, "bf16"),
}


def peak(update: Callable[[], None]) -> int:
    """Bytes beyond those before, by the allocator's own count: FSDP gives storages back that tensors still have."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        update()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    now = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest


def measured_and_predicted(accelerator: Accelerator, case: str, checkpointing: bool) -> tuple[float, float]:
    (model_sizes, (P, prompt, response)), name = CASES[case]
    precision, fp32 = choose_precision(name, "fp32"), choose_precision("fp32", "fp32")
    model, row = random_model(*model_sizes, fp32), random_row(P, prompt, response, True)
    if checkpointing:
        model.recompute_activations()
    parameters = model.model.num_parameters()
    config = StageConfig(model="", output_dir="")
    optimizer = Optimizer(accelerator, model, precision, config, 9, mesh=process_mesh(accelerator.device))
    old = torch.full((P, 2), -response * torch.tensor(float(model_sizes[-1])).log())
    microbatch = Microbatch(row, torch.randn(P, 2), old, old, old, old)

    def update() -> None:
        loss, _ = OBJECTIVE.loss(model, microbatch, P)
        scaled_backward(optimizer, loss)

    update()
    # Buffers of messages live longer if the other process is late.
    measured = min(peak(update) for _ in range(3))
    sizes = Model.from_config(model.model.config, parameters, parameters)
    lengths = Lengths(row.tokens, sum(row.segments.key_lengths), len(row.labels))
    alone = update_memory(sizes, lengths, precision, checkpointing=checkpointing, one_by_one=True)
    predicted = sharded(alone, sizes, precision, 2)
    # Masters, gradients and moments were there before.
    return measured, predicted.peak - predicted.masters - predicted.gradients - predicted.optimizer


if __name__ == "__main__":
    accelerator = Accelerator()
    found = {
        f"{case} {again}": measured_and_predicted(accelerator, case, again)
        for case in CASES
        if case in sys.argv[2:]
        for again in (False, True)
    }
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(found))
    accelerator.end_training()
