"""Predicts what bounds each phase of training on one H100, from counts: operations, bytes, launches and waits. No GPU.

    python -m benchmarks.roofline          # results/roofline.json, and the table in NOTES.md

T tokens, L layers, D hidden size, V vocabulary. The body's launches and the bytes that its elementwise operations move
are counted on PyTorch's meta device with transformers' own modules; other counts follow from shapes. Constants that are
neither counted nor of the data sheet are assumptions, and named so. Kernels of compiled layers come from the record of
`tests.simulated_cuda.compiled_counts`.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig
from transformers.masking_utils import AttentionMaskInterface

FOLDER = Path(__file__).parent
RESULT, NOTES = FOLDER / "results" / "roofline.json", FOLDER / "NOTES.md"
BEGIN, END = "<!-- roofline: begin -->", "<!-- roofline: end -->"
COMPILED = FOLDER / "results" / "compiled_counts.json"
# Operations that launch nothing.
FREE = ("empty", "detach", "_unsafe_view", "prim.device")
THEN = ", layers compiled"

# Assumptions: what an H100 reaches in bf16 products and in copies, the host's time for a launch, a small kernel's time
# in a replayed graph, and how long the device stands still when the host has waited for it.
OPERATIONS, BANDWIDTH = 650e12, 3.0e12
LAUNCH, GRAPH_KERNEL, WAIT = 4e-6, 2e-6, 20e-6
# An update: 64 prompts with two responses each, in rows of packed tokens where a prompt stands once.
PROMPTS, K, PROMPT, RESPONSE, ROW = 64, 2, 350, 40, 8192
# Optimizer steps of an update. Bytes of one a parameter, in half precision: gradients measured, then read with the fp32
# master weights and both moments, these written, and the weights.
STEPS, OPTIMIZER_BYTES = 4, 38
# Launches of a decode step, counted on the meta device: of the step itself and of each layer.
DECODE_LAUNCHES, DECODE_LAUNCHES_OF_LAYER = 47, 39


@dataclass(frozen=True)
class Model:
    name: str
    config: LlamaConfig
    devices: int  # that share the optimizer's states

    @property
    def layer_weights(self) -> int:
        c = self.config
        attention = 2 * c.hidden_size**2 * (1 + c.num_key_value_heads / c.num_attention_heads)
        return c.num_hidden_layers * int(attention + 3 * c.hidden_size * c.intermediate_size)

    @property
    def head_weights(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    @property
    def parameters(self) -> int:
        return self.layer_weights + self.head_weights * (1 if self.config.tie_word_embeddings else 2)

    @property
    def cache_bytes(self) -> int:
        """Of a token's keys and values."""
        c = self.config
        return 2 * 2 * c.num_hidden_layers * c.hidden_size * c.num_key_value_heads // c.num_attention_heads


def llama(D: int, intermediate: int, L: int, *, tied: bool) -> LlamaConfig:
    sizes = {"hidden_size": D, "intermediate_size": intermediate, "num_hidden_layers": L}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    return LlamaConfig(**sizes, **heads, vocab_size=128256, tie_word_embeddings=tied, max_position_embeddings=ROW)


MODELS = (
    Model("1 B", llama(2048, 8192, 16, tied=True), devices=1),
    Model("8 B", llama(4096, 14336, 32, tied=False), devices=8),
)


class Counts(NamedTuple):
    """Operations of products, bytes that products and other kernels move, launches."""

    operations: float
    product_bytes: float
    other_bytes: float
    launches: int


class Counting(TorchDispatchMode):
    """Counts the kernels of meta tensors: each reads its inputs and writes its outputs once."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.product_bytes = self.other_bytes = self.launches = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.is_view or any(word in str(function) for word in FREE):
            return result
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        places = {
            (t.untyped_storage()._cdata, t.storage_offset(), t.numel()): t.numel() * t.element_size() for t in tensors
        }
        self.launches += 1
        if function._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            left, right = [leaf for leaf in args if isinstance(leaf, torch.Tensor)][-2:]
            self.operations += 2 * left.numel() * right.shape[-1]
            self.product_bytes += sum(places.values())
        else:
            self.other_bytes += sum(places.values())
        return result

    def counts(self) -> Counts:
        return Counts(self.operations, self.product_bytes, self.other_bytes, self.launches)


class OneKernel(torch.autograd.Function):
    """Attention as one launch forward and one backward. Its operations are counted from shapes."""

    @staticmethod
    def forward(ctx, query, key, value):
        ctx.shapes = key.shape, value.shape
        return torch.empty_like(query)

    @staticmethod
    def backward(ctx, gradient):
        return (torch.empty_like(gradient), *(gradient.new_empty(shape) for shape in ctx.shapes))


def one_kernel(module, query, key, value, attention_mask, **settings):
    return OneKernel.apply(query, key, value).transpose(1, 2), None


AttentionInterface.register("one_kernel", one_kernel)
AttentionMaskInterface.register("one_kernel", lambda *args, **settings: None)


def body_counts(model: Model, T: int) -> tuple[Counts, Counts]:
    """Of a row of T tokens, forward and backward."""
    with torch.device("meta"):
        body = AutoModelForCausalLM.from_config(
            model.config, dtype=torch.bfloat16, attn_implementation="one_kernel"
        ).model
        ids = torch.empty(1, T, dtype=torch.long)
        # Taken as it is; without one transformers would look at the positions' values.
        mask = torch.empty(1, 1, 1, 1)
    with Counting() as forward:
        hidden = body(input_ids=ids, attention_mask=mask, position_ids=ids, use_cache=False).last_hidden_state
    with Counting() as backward:
        hidden.backward(torch.empty_like(hidden))
    return forward.counts(), backward.counts()


def with_number_of_layers(config: LlamaConfig, number: int) -> LlamaConfig:
    return type(config)(**config.to_dict() | {"num_hidden_layers": number})


def compiled_counts(model: Model, T: int, layer: dict[str, dict[str, int]]) -> tuple[Counts, Counts]:
    """`body_counts` where layers are compiled. layer: kernels of one, forward and backward, in the record's words."""
    outside = replace(model, config=with_number_of_layers(model.config, 0))
    parts = zip(body_counts(model, T), body_counts(outside, T), (layer["forward"], layer["backward"]), strict=True)
    L = model.config.num_hidden_layers
    forward, backward = (
        Counts(
            plain.operations,
            others.product_bytes + L * kernels["product_bytes"],
            others.other_bytes + L * kernels["fused_bytes"],
            others.launches + L * (kernels["fused"] + kernels["products"]),
        )
        for plain, others, kernels in parts
    )
    return forward, backward


@dataclass(frozen=True)
class Phase:
    """A part of an update, with what the device and the host do in it."""

    name: str
    counts: Counts
    graph_kernels: int = 0  # of replayed graphs, whose launches are one of the host's each
    waits: int = 0

    def seconds(self) -> dict[str, float]:
        """Of what the device does one after the other, and of the host, which runs beside it."""
        operations, read = self.counts.operations / OPERATIONS, self.counts.product_bytes / BANDWIDTH
        return {
            "products": operations if operations >= read else 0.0,
            "weights and keys read": read if read > operations else 0.0,
            "other memory traffic": self.counts.other_bytes / BANDWIDTH,
            "small kernels of a graph": self.graph_kernels * GRAPH_KERNEL,
            "host": self.counts.launches * LAUNCH + self.waits * WAIT,
        }

    def total(self) -> float:
        seconds = self.seconds()
        host = seconds.pop("host")
        return max(sum(seconds.values()) + self.waits * WAIT, host)

    def bound(self) -> str:
        seconds = self.seconds()
        host = seconds.pop("host")
        return "host" if host > sum(seconds.values()) else max(seconds, key=lambda name: seconds[name])


def scaled(counts: Counts, rows: float) -> Counts:
    """Of so many rows of ROW tokens; the last launches as much as a full one."""
    return Counts(*(value * rows for value in counts[:3]), counts.launches * math.ceil(rows))


def together(*parts: Counts) -> Counts:
    return Counts(*map(sum, zip(*parts, strict=True)))


def attention(model: Model, pairs: float) -> Counts:
    """Operations of this many pairs of a query and a key."""
    c = model.config
    return Counts(4 * pairs * c.hidden_size * c.num_hidden_layers, 0, 0, 0)


def head(model: Model, N: int, *, backward: bool) -> Counts:
    """Log-probs of N tokens, or a loss with both gradients: fp32 logits written and read, gradients in bf16 written and
    read, the weight's gradient summed in fp32.
    """
    F = N * model.head_weights
    V, chunks, launches = model.config.vocab_size, math.ceil(N / 467), 5
    traffic = 8 * N * V
    if backward:
        traffic, launches = traffic + (4 + 2) * N * V + 14 * model.head_weights, 14
    return Counts((6 if backward else 2) * F, 2 * model.head_weights, traffic, chunks * launches)


def phases(model: Model, forward: Counts, backward: Counts, prefill: Counts | None = None) -> list[Phase]:
    """Of one update. forward, backward: the body's counts for a row. prefill: those of a row of prompts in rollouts,
    whose layers are never compiled; by default forward.
    """
    tokens, N = PROMPTS * (PROMPT + K * RESPONSE), PROMPTS * K * RESPONSE
    rows = tokens / ROW
    prompt_pairs = PROMPTS * PROMPT**2 / 2
    pairs = prompt_pairs + N * (PROMPT + RESPONSE / 2)
    log_probs = together(scaled(forward, rows), attention(model, pairs), head(model, N, backward=False))
    keys = (PROMPTS * PROMPT + N / 2) * model.cache_bytes
    weights = model.layer_weights + model.head_weights
    step = Counts(2 * PROMPTS * K * weights, 2 * weights + keys, 8 * PROMPTS * K * model.config.vocab_size, 1)
    kernels = DECODE_LAUNCHES + DECODE_LAUNCHES_OF_LAYER * model.config.num_hidden_layers
    optimizer = STEPS * OPTIMIZER_BYTES * model.parameters / model.devices
    return [
        Phase("prefill", together(scaled(prefill or forward, PROMPTS * PROMPT / ROW), attention(model, prompt_pairs))),
        Phase("decode", Counts(*(RESPONSE * value for value in step)), graph_kernels=RESPONSE * kernels),
        Phase("old log-probs", log_probs),
        Phase("reference log-probs", log_probs),
        Phase("body forward", together(scaled(forward, rows), attention(model, pairs))),
        Phase("body backward", together(scaled(backward, rows), attention(model, 2.5 * pairs))),
        Phase("head and loss", head(model, N, backward=True)),
        Phase(f"optimizer, {STEPS} steps", Counts(0, 0, optimizer, STEPS * 60), waits=STEPS),
    ]


def updates(model: Model, layer: dict[str, dict[str, int]]) -> tuple[list[Phase], list[Phase]]:
    """Phases of an update with plain layers, and with compiled ones. layer: as in `compiled_counts`."""
    forward, backward = body_counts(model, ROW)
    return phases(model, forward, backward), phases(model, *compiled_counts(model, ROW, layer), prefill=forward)


def in_turns(plain: list[Phase], compiled: list[Phase]) -> list[Phase]:
    """The phases of an update, and after each one that compiled layers change, what it is then."""
    lines: list[Phase] = []
    for phase, other in zip(plain, compiled, strict=True):
        lines += [phase] if other == phase else [phase, replace(other, name=f"{phase.name}{THEN}")]
    return lines


def seconds_of_update(parts: list[Phase]) -> float:
    return sum(phase.total() for phase in parts)


def table(found: dict[str, tuple[list[Phase], list[Phase]]]) -> str:
    lines = [
        "| model | phase | products, ms | weights and keys | other traffic | small kernels | host (launches) | "
        "predicted, ms | bound by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model, (plain, compiled) in found.items():
        for phase in in_turns(plain, compiled):
            *device, host = (f"{1000 * value:.1f}" if value else "–" for value in phase.seconds().values())
            cells = [model, phase.name, *device, f"{host} ({phase.counts.launches})"]
            lines.append(f"| {' | '.join(cells)} | {1000 * phase.total():.0f} | {phase.bound()} |")
        for name, parts in (("whole update", plain), (f"whole update{THEN}", compiled)):
            lines.append(f"| {model} | {name} | | | | | | {1000 * seconds_of_update(parts):.0f} | |")
    return "\n".join(lines)


def main() -> None:
    layers = json.loads(COMPILED.read_text())["layers"]
    found = {model.name: updates(model, layers[model.name]) for model in MODELS}
    record = {
        model: [
            {"phase": phase.name, "seconds": phase.seconds(), "total": phase.total(), "bound": phase.bound()}
            | phase.counts._asdict()
            | {"graph_kernels": phase.graph_kernels, "waits": phase.waits}
            for phase in in_turns(*both)
        ]
        for model, both in found.items()
    }
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    before, rest = NOTES.read_text().split(BEGIN)
    NOTES.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
