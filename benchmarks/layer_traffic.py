"""Counts a layer's launches and the bytes that they move, with fused kernels and as transformers
has it. No GPU.

    python -m benchmarks.layer_traffic          # results/layer_traffic.json; then python -m benchmarks.report --write

The layer's tensors have sizes and no values. A launch reads its inputs and writes its outputs once;
fused kernels tell their tensors instead of running. Attention is left out: it is the same both
ways. Products are counted apart.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig

from benchmarks.records import RESULTS
from fastp3o.models import fused_layers, packed_model
from fastp3o.models.packed_model import PackedModel
from fastp3o_kernels.layers import gate, gate_kernel, norm, norm_kernel, rotary, rotary_kernel

RESULT = RESULTS / "layer_traffic.json"
KERNELS: dict[Any, tuple[str, ...]] = {
    norm_kernel: ("rms_norm_kernel", "rms_norm_gradient_kernel", "weight_gradient_kernel"),
    gate_kernel: ("gate_kernel", "gate_gradient_kernel"),
    rotary_kernel: ("rotary_kernel",),
}
PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
# Operations that launch nothing.
FREE = ("empty", "detach", "_unsafe_view", "prim.device")
NO_ATTENTION = "fastp3o_no_attention"
# Tokens of a packed row, and of a decode step.
ROW, STEP = 8192, 128


class LayerSizes(NamedTuple):
    """Of Llama 3.2 1B and Llama 3.1 8B."""

    hidden: int
    intermediate: int
    heads: int = 32
    key_heads: int = 8


SIZES = {"1 B": LayerSizes(2048, 8192), "8 B": LayerSizes(4096, 14336)}


class Precision(NamedTuple):
    """Dtypes of the weights, and of products under autocast; None without it."""

    weights: torch.dtype
    autocast: torch.dtype | None = None


PRECISIONS = {
    "fp16": Precision(torch.float16),
    "bf16-autocast": Precision(torch.float32, torch.bfloat16),
}


@dataclass
class Traffic:
    """Of one pass. bytes: read and written by all launches but products; kept: held for the
    backward pass, without the weights, but with autocast's copies of them.
    """

    launches: int = 0
    bytes: int = 0
    products: int = 0  # multiply-adds
    product_bytes: int = 0
    kept: int = 0


class Counting(TorchDispatchMode):
    """Adds up the launches of tensors without values."""

    def __init__(self, traffic: Traffic):
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if tensors and not (function.is_view or any(word in str(function) for word in FREE)):
            self.add(function, tensors)
        return result

    def add(self, function: Any, tensors: list[Tensor]) -> None:
        self.traffic.launches += 1
        moved = bytes_of(tensors)
        if getattr(function, "overloadpacket", None) in PRODUCTS:
            left, right = tensors[-3:-1]
            self.traffic.products += left.numel() * right.shape[-1]
            self.traffic.product_bytes += moved
        else:
            self.traffic.bytes += moved


def bytes_of(tensors: list[Tensor]) -> int:
    """Each element once, also of a tensor that is given twice or repeats its elements."""
    places = {}
    for tensor in tensors:
        elements = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            elements *= size if stride else 1
        place = tensor.untyped_storage()._cdata, tensor.storage_offset(), elements
        places[place] = elements * tensor.element_size()
    return sum(places.values())


class Told:
    """In place of a kernel: a launch is the tensors that it gets."""

    def __init__(self, counting: Counting):
        self.counting = counting

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **_: self.counting.add(
            None, [arg for arg in args if isinstance(arg, Tensor)]
        )


@contextmanager
def counted() -> Iterator[Traffic]:
    """Counts what runs in the block, where kernels count as on a GPU."""
    counting = Counting(Traffic())
    with ExitStack() as stack:
        for module, names in KERNELS.items():
            for name in names:
                stack.enter_context(patch.object(module, name, Told(counting)))
        for module in (fused_layers, norm, gate, rotary):
            stack.enter_context(patch.object(module, "use_triton", lambda impl, *_: impl is None))
        stack.enter_context(counting)
        yield counting.traffic


class NoAttention(torch.autograd.Function):
    """Results and gradients without an operation."""

    @staticmethod
    def forward(ctx, query, key, value):
        ctx.save_for_backward(query, key, value)
        return torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, grad):
        return tuple(
            torch.empty_like(tensor.transpose(1, 2)).transpose(1, 2) for tensor in ctx.saved_tensors
        )


def no_attention(module, query, key, value, *_, **__):
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (
            tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value)
        )
    return NoAttention.apply(query, key, value), None


def policy_of(sizes: LayerSizes, precision: Precision, *, fused: bool) -> PackedModel:
    """A policy of one layer, as it runs or as transformers wrote it, on the meta device, without
    attention.
    """
    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_heads,
        num_hidden_layers=1,
        vocab_size=32,
    )
    with (
        torch.device("meta"),
        nullcontext() if fused else patch.object(packed_model, "fuse", lambda *_: None),
    ):
        policy = PackedModel(AutoModelForCausalLM.from_config(config, dtype=precision.weights))
    AttentionInterface.register(NO_ATTENTION, no_attention)
    policy.model.set_attn_implementation(NO_ATTENTION)
    return policy


def passes(sizes: LayerSizes, precision: Precision, *, fused: bool) -> dict[str, Traffic]:
    """Forward and backward of a packed row, and, without autocast, a decode step."""
    (layer,) = policy_of(sizes, precision, fused=fused).layers()
    # Autocast takes no notice of the meta device. Fake tensors, without values either, are on a CPU
    # for it.
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in layer.modules():
            for name, value in module._parameters.items():
                if value is not None:
                    module._parameters[name] = nn.Parameter(
                        torch.empty(value.shape, dtype=value.dtype)
                    )
        stream = torch.float32 if fused else precision.weights
        row = inputs(sizes, ROW, stream, precision)
        kept: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with autocast(precision), hooks, counted() as forward:
            result = layer(row[0].requires_grad_(), position_embeddings=row[1:])
        weights = {parameter.untyped_storage()._cdata for parameter in layer.parameters()}
        forward.kept = bytes_of([x for x in kept if x.untyped_storage()._cdata not in weights])
        with counted() as backward:
            result.backward(torch.empty_like(result))
        step = inputs(sizes, STEP, stream, precision)
        with torch.no_grad(), counted() as decode:
            layer(step[0], position_embeddings=step[1:])
    found = {"forward": forward, "backward": backward}
    # Under autocast the engine samples from a copy in half precision.
    return found | ({"decode step": decode} if precision.autocast is None else {})


def inputs(
    sizes: LayerSizes, tokens: int, stream: torch.dtype, precision: Precision
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual stream, and the cosines and sines of positions."""
    angles = 1, tokens, sizes.hidden // sizes.heads
    cosines, sines = (torch.empty(angles, dtype=precision.weights) for _ in range(2))
    return torch.empty(1, tokens, sizes.hidden, dtype=stream), cosines, sines


def autocast(precision: Precision) -> torch.autocast:
    dtype = precision.autocast
    return torch.autocast("cpu", dtype=dtype, enabled=dtype is not None)


def main() -> None:
    layers = []
    for (name, precision), (size, sizes), fused in product(
        PRECISIONS.items(), SIZES.items(), (False, True)
    ):
        for phase, traffic in passes(sizes, precision, fused=fused).items():
            entry = {"model": size, "precision": name, "fused": fused, "pass": phase} | asdict(
                traffic
            )
            print(json.dumps(entry), flush=True)
            layers.append(entry)
    lines = ",\n".join(map(json.dumps, layers))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    RESULT.write_text(json.dumps(versions)[:-1] + f', "layers": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
