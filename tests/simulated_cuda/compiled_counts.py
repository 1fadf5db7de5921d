"""Kernels that torch.compile leaves of a layer in training, counted for an H100. No GPU.

    python -m tests.simulated_cuda.compiled_counts          # then benchmarks.roofline and benchmarks.report

Tensors have a CUDA device and no values. Inductor lowers the graphs of `--compile_layers` to its kernels as on a GPU,
and stops before it writes their code: its scheduler says which kernels there are, and what each reads and writes.
Uncompiled launches are the operations that the same passes call.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.simulated_cuda import native

native.library()  # before torch is imported

# ruff: noqa: E402
import torch
import torch._functorch.config
import torch._inductor.config
import transformers as hf
from torch import nn
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._subclasses import FakeTensorMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks.roofline import COMPILED, MODELS, ROW, Counts, Model, body_counts, with_number_of_layers
from fastp3o.models.packed_model import PackedModel, eager_forward
from fastp3o.packing.packed_row import Segments

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 * 2**30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20,
    warp_size=32,
    gcnArchName="",
)
CUDA = torch.device("cuda", 0)
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm")
ATTENTION = "torch_attn._varlen_attn"
SEGMENTS = 40  # of a row


class Kernels(NamedTuple):
    """What a graph launches. Bytes: read and written, each buffer once a kernel."""

    fused: int
    products: int
    attention: int
    fused_bytes: int
    product_bytes: int


class LoweredError(Exception):
    """Ends a call whose kernels have been counted."""


def scheduled(graph: GraphLowering) -> Kernels:
    counts = dict.fromkeys(Kernels._fields, 0)
    for node in graph.scheduler.nodes:
        moved = node.get_read_write_buffers_sizes()
        if isinstance(node, NopKernelSchedulerNode) or (node.is_extern() and not moved):
            continue  # a view of what another kernel wrote
        operation = str(getattr(node.node, "op_overload", None)) if node.is_extern() else ""
        if operation.startswith(PRODUCTS):
            counts["products"] += 1
            counts["product_bytes"] += moved
        elif operation.startswith(ATTENTION):
            counts["attention"] += 1
        else:
            counts["fused"] += 1
            counts["fused_bytes"] += moved
    return Kernels(**counts)


@contextmanager
def lowering() -> Iterator[list[Kernels]]:
    """Within the block, torch takes an H100 for given. A compiled call raises LoweredError once its graphs have been
    lowered. Yields their kernels, forward first.
    """
    found: list[Kernels] = []

    def count(graph: GraphLowering) -> SimpleNamespace:
        graph._update_scheduler()
        found.append(scheduled(graph))

        def call(inputs: list) -> None:
            raise LoweredError

        return SimpleNamespace(call=call, __file__="", key="")

    functions: dict[str, Callable[..., Any]] = {
        "torch.accelerator.is_available": lambda: False,  # it is asked for streams
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda._exchange_device": lambda _: 0,
        "torch.cuda._maybe_exchange_device": lambda _: 0,
        "torch.cuda.get_rng_state": lambda *_: torch.get_rng_state(),
        "torch.cuda.set_rng_state": lambda *_: None,
        "torch.cuda.get_device_properties": lambda *_: H100,
        "torch.cuda._get_device_properties": lambda *_: H100,
        "torch.cuda.get_device_capability": lambda *_: (H100.major, H100.minor),
        # Patterns that these graphs do not have, and that are made from values.
        "torch._inductor.fx_passes.fuse_attention._sfdp_init": lambda *_: None,
        "torch._inductor.fx_passes.pad_mm._pad_mm_init": lambda *_: None,
        "torch._inductor.fx_passes.misc_patterns._misc_patterns_init": lambda *_: None,
    }
    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(patch(name, function, create=True))
        stack.enter_context(patch.object(GraphLowering, "compile_to_module", count))
        stack.enter_context(torch._inductor.config.patch(joint_graph_constant_folding=False, force_disable_caches=True))
        stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield found


def on_cuda(model: nn.Module) -> None:
    """Gives a model of the meta device the device of CUDA."""
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(value, device=CUDA), value.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=CUDA)


def packed_model(config: PretrainedConfig) -> PackedModel:
    with torch.device("meta"):
        model = PackedModel(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    on_cuda(model)
    return model


def compiled_layer(config: hf.LlamaConfig) -> dict[str, dict[str, int]]:
    """Kernels of a layer on a row of ROW tokens, forward and backward. Hidden states before it need a gradient."""
    with lowering() as found:
        layer = packed_model(with_number_of_layers(config, 1)).layers()[0]
        with CUDA:
            hidden = torch.empty(1, ROW, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
            positions = tuple(torch.empty(1, ROW, config.head_dim, dtype=torch.bfloat16) for _ in range(2))
            bounds = torch.empty(SEGMENTS + 1, dtype=torch.int32)
        segments = Segments(bounds, bounds, (ROW // SEGMENTS,) * SEGMENTS, (ROW // SEGMENTS,) * SEGMENTS, None)
        run = torch.compile(eager_forward, fullgraph=True, dynamic=False)
        try:
            run(layer, hidden, position_embeddings=positions, segments=segments)
        except LoweredError:
            forward, backward = found
    return {"forward": forward._asdict(), "backward": backward._asdict()}


def plain_layer(model: Model) -> list[dict[str, float]]:
    """What transformers' own layer launches and moves, forward and backward."""
    with_layers = (replace(model, config=with_number_of_layers(model.config, number)) for number in (0, 1))
    passes = zip(*(body_counts(each, ROW) for each in with_layers), strict=True)
    return [Counts(*(one - none for none, one in zip(*both, strict=True)))._asdict() for both in passes]


def take_cuda_for_given() -> None:
    native.library().install()
    torch._C._set_only_lift_cpu_tensors(True)


def main() -> None:
    take_cuda_for_given()
    record = {
        "torch": torch.__version__,
        "transformers": hf.__version__,
        "tokens": ROW,
        "layers": {model.name: {"plain": plain_layer(model)} | compiled_layer(model.config) for model in MODELS},
    }
    COMPILED.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
