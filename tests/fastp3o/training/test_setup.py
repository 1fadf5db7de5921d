"""What is built before a run begins, and what is refused or warned of then."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from fastp3o.config import SamplerConfig, TrainableConfig
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.trainable import add_lora
from fastp3o.rollouts import plan
from fastp3o.rollouts.plan import sampled_model
from fastp3o.runtime.context import Context
from fastp3o.runtime.precision import choose_precision
from fastp3o.training.setup import make_accelerator
from tests.fastp3o.models.model_families import random_model


def beside_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """The variable is set on a machine with a GPU whose driver is too old."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("os.path.exists", lambda path: path == "/dev/nvidia0")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (
            "ACCELERATE_USE_FSDP",
            "true",
            "asks for FSDP, and fastp3o shards models itself: start with torchrun",
        ),
        (
            "ACCELERATE_USE_DEEPSPEED",
            "true",
            "asks for DEEPSPEED, and fastp3o shards models itself",
        ),
        (
            "CUDA_VISIBLE_DEVICES",
            "0",
            "torch for CUDA 13.0 cannot use this GPU: .*ACCELERATE_USE_CPU=true trains on the",
        ),
        (
            "WORLD_SIZE",
            "2",
            "torchrun started 2 processes, and accelerate sees 1: .*ACCELERATE_USE_CPU",
        ),
    ],
)
def test_engines_of_accelerate_and_processes_that_it_does_not_see_are_refused(
    monkeypatch, name, value, says
):
    beside_a_gpu(monkeypatch, name, value)
    monkeypatch.setattr("accelerate.Accelerator.num_processes", 1)
    with pytest.raises(ValueError, match=says):
        make_accelerator(0, choose_precision("fp32", "fp32"))


@pytest.mark.parametrize(
    ("name", "value"), [("CUDA_VISIBLE_DEVICES", ""), ("ACCELERATE_USE_CPU", "true")]
)
def test_a_run_names_its_device_which_is_the_cpu_beside_a_gpu_if_that_is_asked_for(
    monkeypatch, capsys, name, value
):
    beside_a_gpu(monkeypatch, name, value)
    make_accelerator(0, choose_precision("fp32", "fp32"))
    assert capsys.readouterr().out == "device: 1 x the CPU, fp32\n"


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast", "bf16", "fp16"])
@pytest.mark.parametrize(("device", "memory"), [("cpu", 10**12), ("cuda", 10**12), ("cuda", 0)])
def test_on_a_gpu_a_copy_is_sampled_where_it_differs(device, memory, precision, lora, monkeypatch):
    made = []

    def copy(policy, device, dtype, *, merges):
        made.append((dtype, merges))
        return SimpleNamespace(
            model="copy", bytes=10**9, memory=torch.empty(0), gathered=lambda model: nullcontext()
        )

    monkeypatch.setattr(plan, "SamplingCopy", copy)
    free = [memory, 10**10 if precision in ("fp32", "bf16") else 10**8]
    monkeypatch.setattr(plan, "available_memory", lambda _: free.pop(0))
    policy = PackedModel(random_model("llama"))
    if lora:
        add_lora(policy, TrainableConfig(lora_rank=2))
    arithmetic = choose_precision(precision, "fp32")
    accelerator = SimpleNamespace(device=torch.device(device), print=print)
    sampled = sampled_model(SamplerConfig(), policy, Context(accelerator, arithmetic, None, None))
    assert sampled.model is policy
    # Without room adapters stay as they are; autocast's copy is no more than its passes take.
    if device == "cuda" and precision == "bf16-autocast":
        assert made == [(torch.bfloat16, lora)]
    elif device == "cuda" and lora and memory:
        assert made == [(arithmetic.weights, True)]
    else:
        assert made == []
        assert sampled.copy is None
    # The first rollout finds the memory that is left, and decides for all.
    sampler = sampled.gathered(lambda model: lambda *_: model)
    assert [sampler([], 2, seed) for seed in range(2)] == 2 * [
        "copy" if made and precision != "fp16" else policy
    ]
