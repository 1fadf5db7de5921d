"""Predicts the memory of P3O's passes from a model's configuration and the lengths, by the formula
on fastp3o/training/memory.md. `fastp3o memory` is for users.
"""

from copy import copy
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import nn

from fastp3o.models.fused_layers import Wiring, gate_of, norm_of
from fastp3o.models.packed_model import PackedModel
from fastp3o.packing.pack import Packing, group_tokens
from fastp3o.rollouts.cache import Room
from fastp3o.rollouts.engine import TOKENS_PER_ROW
from fastp3o.runtime.precision import Precision, choose_precision
from fastp3o_kernels.head.chunks import MEMORY_BUDGET, TILE, HeadPlan, plan_chunks
from fastp3o_kernels.head.head import HeadDtypes, multiplies

# Elements below which bitsandbytes keeps a tensor's moments in fp32, and those that share a scale.
LEAST_IN_8_BITS, BLOCK = 4096, 256


OptimizerName = Literal["adamw", "adamw_8bit"]


# --- lengths and shapes ---------------------------------------------------------------------------


class Lengths(NamedTuple):
    """A packed row: tokens T, gathered keys U, tokens with labels N."""

    tokens: int
    keys: int
    labeled: int

    @classmethod
    def full_row(
        cls, packing: Packing, *, prompt: int, response: int, responses_per_prompt: int = 2
    ) -> "Lengths":
        """A row filled with whole groups of these mean lengths, or the largest part of a group that
        is too long.
        """
        sizes = [
            group_tokens(prompt, [response] * count, share_prompts=packing.share_prompts)
            for count in range(1, responses_per_prompt + 1)
        ]
        fitting = max(1, sum(size <= packing.tokens_per_row for size in sizes))
        groups = max(1, packing.tokens_per_row // sizes[-1])
        keys = groups * fitting * (prompt + response)
        return cls(groups * sizes[fitting - 1], keys, groups * responses_per_prompt * response)


class Model:
    """Sizes of a llama-like model, which may be on the meta device.

    trained: parameters that train. trained_layers: those from the lowest that trains upwards, 0 for
    all; only they keep activations. LoRA trains in all. queries, keys: heads times head size.
    embeddings: parameters outside the layers. layer: parameters of one layer. in_fp32: trained ones
    whose moments adamw_8bit keeps in fp32.

    What `fuse` has recognized in the last layer: finer: its residual stream is fp32; norms: of its
    hidden states, 2 or 4; norms_heads: it normalizes queries and keys, too; fused_norms,
    fused_gate: these are one kernel each on a GPU.
    """

    def __init__(self, model: PackedModel, trained_layers: int = 0):
        config = model.model.config.get_text_config()
        head = model.model.get_output_embeddings()

        # What trains. bitsandbytes keeps moments of embeddings and of small tensors in fp32.
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        embeddings = {part.weight for part in model.modules() if isinstance(part, nn.Embedding)}
        self.trained = sum(parameter.numel() for parameter in trained)
        self.in_fp32 = sum(
            parameter.numel()
            for parameter in trained
            if parameter in embeddings or parameter.numel() < LEAST_IN_8_BITS
        )
        self.head_trains = head is not None and head.weight.requires_grad

        # The width of hidden states, of feed-forward parts, and of queries and keys.
        self.hidden = config.hidden_size
        intermediate = getattr(config, "intermediate_size", None) or 4 * self.hidden
        # Gemma 3n: by layer.
        self.intermediate = intermediate if isinstance(intermediate, int) else max(intermediate)
        heads = getattr(config, "num_attention_heads", None) or 1
        head_size = getattr(config, "head_dim", None) or self.hidden // heads
        self.queries = head_size * heads
        self.keys = head_size * (getattr(config, "num_key_value_heads", None) or heads)

        # Parameters of the embeddings and of each layer. A reward model gives one number.
        self.parameters = model.model.num_parameters()
        self.vocabulary = 1 if head is None else config.vocab_size
        self.tied = config.tie_word_embeddings
        matrices = 1 if self.tied or head is None else 2
        self.embeddings = config.vocab_size * self.hidden * matrices
        self.layers = config.num_hidden_layers
        self.layer = (self.parameters - self.embeddings) // self.layers
        self.trained_layers = trained_layers or self.layers

        # What `fuse` has recognized.
        last = (model.stack() or [nn.Module()])[-1]
        wiring: Wiring | None = getattr(last, "fastp3o_wiring", None)
        self.finer = wiring is not None
        self.norms = 2 if wiring is None else len(wiring.norms)
        fused = sum(norm_of(part) is not None for part in last.modules())
        self.fused_norms, self.norms_heads = fused > 0, fused > self.norms
        self.fused_gate = any(gate_of(part) is not None for part in last.modules())

    def cut(self, processes: int) -> "Model":
        """The part of it that each process of a tensor group has, and that is active in it. Norms
        are taken for cut.
        """
        part = copy(self)
        sizes = (
            "parameters",
            "trained",
            "vocabulary",
            "intermediate",
            "queries",
            "keys",
            "embeddings",
            "layer",
            "in_fp32",
        )
        for size in sizes:
            setattr(part, size, -(-getattr(self, size) // processes))
        return part

    def head_gradient(self, item: int) -> int:
        """Bytes of the gradient of the head's weight."""
        return item * self.vocabulary * self.hidden if self.head_trains else 0


# --- passes that train ----------------------------------------------------------------------------


@dataclass
class Memory:
    """Bytes. `head` and `layer` are the needs of two moments, of which the larger counts, and
    `embeddings` those of one without activations. `cache`: keys and values of rollouts. `others`:
    what waits, of other models.
    """

    weights: int
    head: int
    layer: int
    masters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    embeddings: int = 0
    cache: int = 0
    others: int = 0

    @property
    def peak(self) -> int:
        kept = (
            self.weights + self.masters + self.gradients + self.optimizer + self.cache + self.others
        )
        return kept + max(self.activations + max(self.head, self.layer), self.embeddings)


def update_memory(
    model: Model,
    lengths: Lengths,
    precision: Precision,
    *,
    checkpointing: bool = False,
    optimizer: OptimizerName = "adamw",
    kernels: bool = True,
    budget: int = MEMORY_BUDGET,
) -> Memory:
    """The memory of a policy's update on one device. kernels: on a GPU, with Triton. budget: of the
    head, in bytes.
    """
    item, stream = product_bytes(precision), stream_bytes(model, precision)
    # Autocast copies weights to the products' dtype, and keeps the copies for the backward pass;
    # with recomputation those of one layer, except while the head computes.
    copies = 0 if precision.autocast is None else 2 * model.parameters
    kept_copies = copies // model.layers if checkpointing else copies
    # While a layer computes: its widest products, and with recomputation all that it keeps.
    layer_activations = kept_by_a_layer(model, lengths, precision, kernels=kernels)
    layer_input = lengths.tokens * model.hidden * stream
    products = 2 * item * model.intermediate + (stream + item) * model.hidden
    layer = lengths.tokens * products
    kept_of_a_layer = layer_activations
    if checkpointing:
        layer += layer_activations
        kept_of_a_layer = layer_input
    # Tied embeddings have a gradient of the head's and one of their own use.
    tied_gradient = model.head_gradient(precision.weights.itemsize) if model.tied else 0
    moments = 8 * model.trained
    if optimizer == "adamw_8bit":
        moments = 8 * model.in_fp32 + 2 * (model.trained - model.in_fp32) * (BLOCK + 4) // BLOCK
    head = head_memory(model, lengths, precision, kernels=kernels, budget=budget)
    return Memory(
        weights=model.parameters * precision.weights.itemsize + kept_copies,
        masters=4 * model.trained if precision.half else 0,
        gradients=4 * model.trained,
        optimizer=moments,
        activations=model.trained_layers * kept_of_a_layer,
        embeddings=2 * tied_gradient,
        head=head + copies - kept_copies,
        layer=layer + tied_gradient,
    )


def head_memory(
    model: Model, lengths: Lengths, precision: Precision, *, kernels: bool, budget: int
) -> int:
    """Bytes that the head and its loss take in an update, beside what layers keep."""
    item = product_bytes(precision)
    plan = head_plan(model, lengths.labeled, precision, budget, kernels=kernels)
    # The weight's gradient adds up in fp32 over chunks of rows, and is rounded in the end; one
    # chunk in bf16 needs neither.
    in_bf16 = precision.weights == torch.bfloat16 == plan.dtypes.dlogits
    is_one_product = in_bf16 and plan.dlogits_rows >= lengths.labeled
    gradient = model.head_gradient(2 if is_one_product else 4)
    rounded = model.head_gradient(2) if precision.half and not is_one_product else 0
    # A chunk of logits, and their gradients, unless these take the logits' place.
    buffers = logits_bytes(plan)
    if not plan.in_place:
        buffers += plan.row_elements * plan.dlogits_rows * item
    states = 3 * lengths.labeled * model.hidden * item
    states += lengths.tokens * model.hidden * norm_bytes(model, precision, kernels=kernels)
    # The chunk is gone when the gradient is rounded.
    return states + widened(model, lengths, plan, precision) + gradient + max(buffers, rounded)


def together(
    update: Memory,
    frozen: Memory,
    rollouts: Memory,
    *,
    second: bool,
    offload: bool,
    judge: Memory | None = None,
    rival: Memory | None = None,
) -> list[Memory]:
    """The phases of a run, each with what waits beside it: update, reference's pass, rollouts, and
    those of a judge and a rival if there are any. second: whether the reference is a model of its
    own. offload: whether that and the judge are on the CPU between uses. judge: a pass over its
    questions. rival: its rollouts, before the first step makes moments. Gradients are freed after
    each step.
    """
    reference = frozen.weights if second else 0
    waiting = 0 if judge is None or offload else judge.weights
    kept = waiting + (0 if offload else reference)
    trains = {"masters": update.masters, "optimizer": update.optimizer}
    phases = [
        replace(update, others=kept),
        replace(frozen, others=waiting + reference, **trains),
        replace(rollouts, others=kept, **trains),
    ]
    if judge is not None:
        phases.append(replace(judge, others=frozen.weights + kept - waiting, **trains))
    if rival is not None:
        phases.append(replace(rival, others=frozen.weights + kept, masters=update.masters))
    return phases


def kept_by_a_layer(model: Model, lengths: Lengths, precision: Precision, *, kernels: bool) -> int:
    """Bytes that a layer keeps for its backward pass.

    With kernels a norm keeps the stream and its result, one behind a block that block's result, and
    a gate its two inputs and its result. Attention keeps queries, gathered keys and values, and its
    result. Without kernels more steps keep what they get.
    """
    item = product_bytes(precision)
    behind = item if kernels and model.fused_norms else 8
    norms = 2 * norm_bytes(model, precision, kernels=kernels) + (model.norms - 2) * behind
    gate = 3 if kernels and model.fused_gate else 4
    # On a CPU segments are computed one by one, and their results joined.
    attends = 2 if kernels else 3
    elements = gate * model.intermediate + attends * model.queries
    normed_heads = 0
    if model.norms_heads:
        one_kernel = kernels and precision.autocast is None
        normed_heads = (item if one_kernel else 8 if item == 4 else 6) * (
            model.queries + model.keys
        )
    kept = lengths.tokens * (norms * model.hidden + item * elements + normed_heads)
    return kept + lengths.keys * 2 * item * model.keys


# --- the head -------------------------------------------------------------------------------------


def head_plan(
    model: Model, labeled: int, precision: Precision, budget: int, *, kernels: bool
) -> HeadPlan:
    """How so many labeled tokens go through the head. Groups are taken for short."""
    rounded = precision.autocast or precision.weights
    half = rounded != torch.float32
    multiplied = rounded if kernels or not half else torch.float32
    narrow = kernels or (rounded == torch.bfloat16 and multiplies(rounded))
    dtypes = HeadDtypes(rounded, multiplied, rounded if narrow else multiplied, torch.float32)
    bounds = [*range(0, labeled, TILE), labeled]
    return plan_chunks(bounds, model.vocabulary, dtypes, budget, triton=kernels)


def logits_bytes(plan: HeadPlan) -> int:
    return plan.row_elements * plan.logits_rows * plan.dtypes.logits.itemsize


def widened(model: Model, lengths: Lengths, plan: HeadPlan, precision: Precision) -> int:
    """Bytes of the head's weight and hidden states in fp32, where a CPU multiplies no narrower
    ones.
    """
    wider = plan.dtypes.multiplied != plan.dtypes.rounded
    return 4 * model.hidden * (model.vocabulary + lengths.labeled) if wider else 0


# --- several processes ----------------------------------------------------------------------------


def sharded(memory: Memory, model: Model, precision: Precision, shards: int) -> Memory:
    """The memory on each of the processes that share the model. `memory`: an update's, or a frozen
    model's.
    """
    item = precision.weights.itemsize
    trained = model.trained if memory.optimizer else 0
    frozen = model.parameters - trained
    copies = memory.weights - item * model.parameters  # autocast's
    whole = item * (model.embeddings + model.layer) + copies
    gradient = (item + 4) * model.layer if trained else 0
    return replace(
        memory,
        weights=whole + item * frozen // shards,
        masters=4 * trained // shards,
        gradients=memory.gradients // shards,
        optimizer=memory.optimizer // shards,
        layer=memory.layer + gradient,
    )


# --- models that do not train, and rollouts -------------------------------------------------------


def frozen_memory(
    model: Model,
    lengths: Lengths,
    precision: Precision,
    *,
    kernels: bool = True,
    budget: int = MEMORY_BUDGET,
) -> Memory:
    """The memory of the reference's log-probabilities. A reward model needs all of it except the
    head's part.
    """
    item = product_bytes(precision)
    residual, autocast = precision.weights.itemsize, precision.autocast is not None
    plan = head_plan(model, lengths.labeled, precision, budget, kernels=kernels)
    hidden = model.hidden * (
        (lengths.tokens + lengths.labeled) * residual + lengths.labeled * item * autocast
    )
    rounded = 2 * model.vocabulary * model.hidden * autocast
    return Memory(
        weights=model.parameters * residual,
        head=logits_bytes(plan) + hidden + rounded + widened(model, lengths, plan, precision),
        layer=layer_pass(model, lengths, precision),
    )


def rollout_memory(model: Model, room: Room, precision: Precision, *, shards: int = 1) -> Memory:
    """The memory of sampling on one device, next to masters and optimizer. It is given back before
    the update.

    shards: processes that share the model, each of which samples from a whole copy. A copy with
    adapters merged that a single process makes only where there is room for it, to sample faster,
    is not counted.
    """
    sampled = precision if precision.autocast is None else choose_precision("bf16", "bf16")
    item = sampled.weights.itemsize
    row = Lengths(tokens=TOKENS_PER_ROW, keys=TOKENS_PER_ROW, labeled=0)
    copied = shards > 1 or precision.autocast is not None
    # Parts of a model in half precision are its masters.
    gathered = (
        0
        if precision.half and shards > 1
        else model.parameters * precision.weights.itemsize // shards
    )
    return Memory(
        weights=gathered + (model.parameters * item if copied else 0),
        head=4 * room.slots * model.vocabulary,
        layer=layer_pass(model, row, sampled),
        cache=room.tokens * model.layers * 2 * model.keys * item,
    )


# --- parts of a layer -----------------------------------------------------------------------------


def product_bytes(precision: Precision) -> int:
    """Bytes of an element of a product."""
    return (precision.autocast or precision.weights).itemsize


def stream_bytes(model: Model, precision: Precision) -> int:
    """Bytes of an element of the residual stream."""
    return 4 if model.finer else precision.weights.itemsize


def norm_bytes(model: Model, precision: Precision, *, kernels: bool) -> int:
    """Bytes that a norm of the stream keeps of each element of a token: the stream, and its result
    as products take it. PyTorch's own steps keep the normalized numbers, too, and with a stream in
    half precision those in fp32.
    """
    stream, item = stream_bytes(model, precision), product_bytes(precision)
    if kernels and model.fused_norms and model.finer:
        return stream + item
    # Autocast rounds the result for each of the five products that take it, and keeps each copy.
    results = item if precision.autocast is None else 5
    if kernels and model.fused_norms:
        return stream + results
    return stream + 4 + results if stream == 4 else 8


def layer_pass(model: Model, lengths: Lengths, precision: Precision) -> int:
    """The wider moment of a layer without gradients."""
    item, residual = product_bytes(precision), stream_bytes(model, precision)
    feed_forward = lengths.tokens * (4 * residual * model.hidden + 3 * item * model.intermediate)
    # Rotary embeddings leave fp32 queries and keys beside those that autocast rounds.
    rotated = residual if precision.autocast is not None else 0
    attention = lengths.tokens * (
        3 * residual * model.hidden
        + (rotated + item * (3 if item == 4 else 2)) * model.queries
        + (rotated + 2 * item) * model.keys
    )
    if lengths.keys > lengths.tokens:
        attention += lengths.keys * 2 * item * model.keys
    return max(feed_forward, attention)
