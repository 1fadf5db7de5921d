"""Predicts the memory of P3O's passes from a model's configuration and the lengths, by the formula on
fastp3o/training/memory.md. `fastp3o memory` is for users.
"""

from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fastp3o.models.packed_model import PackedModel
from fastp3o.packing.pack import Packing, group_tokens
from fastp3o.precision import Precision, choose_precision
from fastp3o.rollouts.cache import Room
from fastp3o.rollouts.engine import TOKENS_PER_ROW
from fastp3o_kernels.head.chunks import LEAST_SHARE, MEMORY_BUDGET, SHARES


class Lengths(NamedTuple):
    """A packed row: tokens T, gathered keys U, tokens with labels N."""

    tokens: int
    keys: int
    labelled: int

    @classmethod
    def full_row(cls, packing: Packing, *, prompt: int, response: int, responses_per_prompt: int = 2) -> "Lengths":
        """A row filled with whole groups of these mean lengths, or the largest part of a group that is too long."""
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

    trained: parameters that train. trained_layers: those from the lowest that trains upwards, 0 for all; only they keep
    activations. LoRA trains in all. queries, keys: heads times head size. embeddings: parameters outside the layers.
    layer: parameters of one layer.
    """

    def __init__(self, model: PackedModel, trained_layers: int = 0):
        config = model.model.config.get_text_config()
        self.parameters, self.head_trains = model.model.num_parameters(), model.head().weight.requires_grad
        self.trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self.layers, self.hidden, self.vocabulary = config.num_hidden_layers, config.hidden_size, config.vocab_size
        self.trained_layers = trained_layers or self.layers
        self.intermediate = getattr(config, "intermediate_size", None) or 4 * self.hidden
        heads = config.num_attention_heads
        head = getattr(config, "head_dim", None) or self.hidden // heads
        self.queries = head * heads
        self.keys = head * (getattr(config, "num_key_value_heads", None) or heads)
        self.tied = config.tie_word_embeddings
        self.embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        self.layer = (self.parameters - self.embeddings) // self.layers

    def cut(self, processes: int) -> "Model":
        """The part of it that each process of a tensor group has, and that is active in it. Norms are taken for cut."""
        part = copy(self)
        for size in ("parameters", "trained", "vocabulary", "intermediate", "queries", "keys", "embeddings", "layer"):
            setattr(part, size, -(-getattr(self, size) // processes))
        return part

    def head_gradient(self, item: int) -> int:
        """Bytes of the gradient of the head's weight."""
        return item * self.vocabulary * self.hidden if self.head_trains else 0


@dataclass
class Memory:
    """Bytes. `head` and `layer` are the needs of two moments, of which the larger counts, and `embeddings` those of one
    without activations. `cache`: keys and values of rollouts.
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

    @property
    def peak(self) -> int:
        kept = self.weights + self.masters + self.gradients + self.optimizer + self.cache
        return kept + max(self.activations + max(self.head, self.layer), self.embeddings)


def update_memory(model: Model, lengths: Lengths, precision: Precision, *, checkpointing: bool = False) -> Memory:
    """The memory of a policy's update on one device."""
    norms, item = element_bytes(precision)
    dlogits = lengths.labelled * model.vocabulary * item
    logits = min(dlogits + 4 * lengths.labelled * model.vocabulary, MEMORY_BUDGET)
    single = precision.weights == torch.bfloat16 and dlogits <= (1 - LEAST_SHARE / SHARES) * MEMORY_BUDGET
    rounded = model.head_gradient(2) if precision.half and not single else 0
    states = 3 * lengths.labelled * model.hidden * item + lengths.tokens * model.hidden * norms // 2
    head = states + model.head_gradient(2 if single else 4) + max(logits, rounded)
    products = 4 * model.intermediate + 2 * model.queries
    layer_activations = lengths.tokens * (norms * model.hidden + item * products)
    layer_activations += lengths.keys * 2 * item * model.keys
    layer_input = lengths.tokens * model.hidden * precision.weights.itemsize
    copies = 0 if precision.autocast is None else 2 * model.parameters
    kept_copies = copies // model.layers if checkpointing else copies
    tied_gradient = model.head_gradient(precision.weights.itemsize) if model.tied else 0
    return Memory(
        weights=model.parameters * precision.weights.itemsize + kept_copies,
        masters=4 * model.trained if precision.half else 0,
        gradients=4 * model.trained,
        optimizer=8 * model.trained,
        activations=model.trained_layers * (layer_input if checkpointing else layer_activations),
        embeddings=2 * tied_gradient,
        head=head + copies - kept_copies,
        layer=lengths.tokens * item * 2 * (model.intermediate + model.hidden)
        + tied_gradient
        + (layer_activations if checkpointing else 0),
    )


def sharded(memory: Memory, model: Model, precision: Precision, shards: int) -> Memory:
    """The memory on each of the processes that share the model. `memory`: an update's, or a frozen model's."""
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


def frozen_memory(model: Model, lengths: Lengths, precision: Precision) -> Memory:
    """The memory of the reference's log-probabilities. A reward model needs all of it except the head's part."""
    _, item = element_bytes(precision)
    residual, autocast = precision.weights.itemsize, precision.autocast is not None
    logits = min(4 * lengths.labelled * model.vocabulary, MEMORY_BUDGET)
    hidden = model.hidden * ((lengths.tokens + lengths.labelled) * residual + lengths.labelled * item * autocast)
    return Memory(
        weights=model.parameters * residual,
        head=logits + hidden + 2 * model.vocabulary * model.hidden * autocast,
        layer=layer_pass(model, lengths, precision),
    )


def rollout_memory(
    model: Model, room: Room, precision: Precision, *, shards: int = 1, adapters: bool = False
) -> Memory:
    """The memory of sampling on one device, next to masters and optimizer. It is given back before the update.

    shards: processes that share the model, each of which samples from a whole copy. adapters: whether they are merged
    into one.
    """
    sampled = precision if precision.autocast is None else choose_precision("bf16", "bf16")
    item = sampled.weights.itemsize
    row = Lengths(tokens=TOKENS_PER_ROW, keys=TOKENS_PER_ROW, labelled=0)
    copied = shards > 1 or adapters or precision.autocast is not None
    # Parts of a model in half precision are its masters.
    gathered = 0 if precision.half and shards > 1 else model.parameters * precision.weights.itemsize // shards
    return Memory(
        weights=gathered + (model.parameters * item if copied else 0),
        head=4 * room.slots * model.vocabulary,
        layer=layer_pass(model, row, sampled),
        cache=room.tokens * model.layers * 2 * model.keys * item,
    )


def element_bytes(precision: Precision) -> tuple[int, int]:
    """Bytes of a layer's two norms for each hidden element of a token, and bytes of an element of a product."""
    if precision.half:
        return 16, 2
    return (24, 4) if precision.autocast is None else (26, 2)


def layer_pass(model: Model, lengths: Lengths, precision: Precision) -> int:
    """The wider moment of a layer without gradients."""
    _, item = element_bytes(precision)
    residual = precision.weights.itemsize
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
