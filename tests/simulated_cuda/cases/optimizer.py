"""Optimizer steps on the pretended device: the host reads of them once an update."""

import gc

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from fastp3o.config import StageConfig
from fastp3o.optimizer.optimizer import Optimizer
from fastp3o.runtime.finiteness import NotFiniteError
from fastp3o.runtime.precision import choose_precision
from tests.fastp3o.backward import scaled_backward
from tests.simulated_cuda.host import recorded

LAUNCHES = {"fp32": 20, "bf16": 20, "fp16": 30}  # of a step, however many parameters there are


@pytest.mark.parametrize("precision", LAUNCHES)
def test_steps_wait_nowhere_and_the_host_reads_of_them_once(precision):
    config = StageConfig(model="", output_dir="")
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    optimizer = Optimizer(
        Accelerator(), model, choose_precision(precision, "fp32"), config, steps=9
    )
    x = torch.ones(2, 4, device="cuda", dtype=optimizer.precision.weights)
    for _ in range(2):
        loss = model(x).float().sum()
        scaled_backward(optimizer, loss)
        with recorded() as record:
            optimizer.step(loss.detach())
        assert not record.waits, record.table()
    # The first step makes the moments.
    assert record.launches.total() <= LAUNCHES[precision], record.table()
    scaled_backward(optimizer, model(x).float().sum())
    optimizer.step(torch.full((), float("nan"), device="cuda"))
    with recorded() as record, pytest.raises(NotFiniteError, match="the loss"):
        optimizer.require_finite()
    assert len(record.waits) == 1


@pytest.mark.parametrize(
    ("precision", "size"), [("fp32", 16), ("bf16-autocast", 16), ("bf16", 18), ("fp16", 18)]
)
def test_what_stays_of_a_parameter_is_predicted(precision, size):
    """Bytes of its weight, its fp32 master in half precision, its gradient and AdamW's moments."""
    gc.collect()
    before, model = torch.cuda.memory_allocated(), nn.Linear(512, 512, bias=False)
    config = StageConfig(model="", output_dir="")
    optimizer = Optimizer(
        Accelerator(), model, choose_precision(precision, "fp32"), config, steps=9
    )
    x = torch.ones(2, 512, device="cuda", dtype=optimizer.precision.weights)
    scaled_backward(optimizer, model(x).float().sum())
    optimizer.step(torch.zeros((), device="cuda"))
    scaled_backward(optimizer, model(x).float().sum())
    assert torch.cuda.memory_allocated() - before == pytest.approx(size * 512**2, rel=0.01)
