"""Predicts the memory of P3O's passes from a model's configuration and the lengths. `scripts/memory.py` is for users.

Per parameter, in bytes:

    precision        weights    fp32 masters    gradients    AdamW
    fp32             4          0               4            8
    bf16-autocast    4 + 2      0               4            8        (+ 2: autocast's copies within a pass)
    bf16, fp16       2          4               4            8

Masters, gradients and AdamW count only for what trains; with gradient checkpointing autocast copies one layer at a
time. A llama-like body with D hidden, F intermediate, Q = heads · head size, R = key heads · head size has these
activations, in elements for each of T tokens in each layer:

    norms · D + item · (4 F + 3 Q + 2 R U / T)        norms = 24, 26 or 16 bytes; item = 4, 2 or 2

U / T is the number of gathered keys over the number of tokens: 1, or more where prompts are shared. With gradient
checkpointing only the input of each layer stays (4 D, 4 D or 2 D bytes), and one layer's activations are added.
Next to activations, the larger of two moments counts: the head's (its budget for logits and their gradient, or what the
labelled tokens need if that is less, its weight's gradient and the last norm's activations), and that of a layer's
backward pass, 2 (F + D) elements a token.

Each of n processes that share a model holds an n-th of fp32 weights, gradients and AdamW's moments, and of frozen
weights. Embeddings, head, and the layer that computes are whole, in the weights' dtype; so is that layer's gradient,
until it is added up over the processes in fp32. (On a GPU the next layer arrives meanwhile, and is whole too.)

Rollouts, before the update, keep 2 R elements of each cached token in each layer; a step makes logits and probabilities
in fp32. Autocast and LoRA add a copy of the weights, in the precision of the passes, which is sampled.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from transformers import PretrainedConfig

from fastp3o.packing.pack import Packing, group_tokens
from fastp3o.precision import Precision
from fastp3o.rollouts.cache import Room
from fastp3o.rollouts.prefill import TOKENS_PER_ROW
from fastp3o_kernels.head.chunks import MEMORY_BUDGET


class Lengths(NamedTuple):
    """A packed row: tokens T, gathered keys U, tokens with labels N."""

    tokens: int
    keys: int
    labelled: int

    @classmethod
    def full_row(cls, packing: Packing, *, prompt: int, response: int, responses_per_prompt: int = 2) -> "Lengths":
        """A row filled with whole groups of these mean lengths, at least one."""
        group = group_tokens(prompt, [response] * responses_per_prompt, share_prompts=packing.share_prompts)
        groups = max(1, packing.tokens_per_row // group)
        responses = groups * responses_per_prompt
        return cls(groups * group, responses * (prompt + response), responses * response)


class Model(NamedTuple):
    """Sizes of a llama-like model.

    `queries` and `keys` are heads times head size. `trained_layers` are those from the lowest that trains upwards; only
    they keep activations. LoRA trains in all.
    """

    parameters: int
    trained: int
    layers: int
    trained_layers: int
    hidden: int
    intermediate: int
    queries: int
    keys: int
    vocabulary: int
    head_trains: bool
    embeddings: int  # parameters outside the layers

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        return (self.parameters - self.embeddings) // self.layers

    @classmethod
    def from_config(
        cls,
        config: PretrainedConfig,
        parameters: int,
        trained: int,
        *,
        trained_layers: int = 0,
        head_trains: bool = True,
    ) -> "Model":
        """`trained_layers` 0 means all, as in the configuration."""
        config = config.get_text_config()
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        intermediate = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        return cls(
            parameters,
            trained,
            config.num_hidden_layers,
            trained_layers or config.num_hidden_layers,
            config.hidden_size,
            intermediate,
            head * config.num_attention_heads,
            head * key_heads,
            config.vocab_size,
            head_trains,
            config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2),
        )


@dataclass
class Memory:
    """Bytes. `head` and `layer` are the needs of two moments, of which the larger counts. `cache`: keys and values of
    rollouts.
    """

    weights: int
    head: int
    layer: int
    masters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    cache: int = 0

    @property
    def peak(self) -> int:
        kept = self.weights + self.masters + self.gradients + self.optimizer + self.activations + self.cache
        return kept + max(self.head, self.layer)


def update_memory(
    model: Model,
    lengths: Lengths,
    precision: Precision,
    *,
    checkpointing: bool = False,
    memory_budget: int = MEMORY_BUDGET,
) -> Memory:
    """The memory of a policy's update on one device."""
    norms, item = element_bytes(precision)
    layer_activations = lengths.tokens * (norms * model.hidden + item * (4 * model.intermediate + 3 * model.queries))
    layer_activations += lengths.keys * 2 * item * model.keys
    layer_input = lengths.tokens * model.hidden * precision.weights.itemsize
    labelled_hidden = lengths.labelled * model.hidden * item
    logits = min(lengths.labelled * model.vocabulary * (4 + item), memory_budget)
    head_gradient = 4 * model.vocabulary * model.hidden if model.head_trains else 0
    return Memory(
        weights=weights(model, precision, one_layer_at_a_time=checkpointing),
        masters=4 * model.trained if precision.half else 0,
        gradients=4 * model.trained,
        optimizer=8 * model.trained,
        activations=model.trained_layers * (layer_input if checkpointing else layer_activations),
        head=logits + 3 * labelled_hidden + head_gradient + lengths.tokens * model.hidden * norms // 2,
        layer=feed_forward(model, lengths, item) + (layer_activations if checkpointing else 0),
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


def frozen_memory(
    model: Model, lengths: Lengths, precision: Precision, *, memory_budget: int = MEMORY_BUDGET
) -> Memory:
    """The memory of the reference's log-probabilities. A reward model needs all of it except the head's part."""
    _, item = element_bytes(precision)
    logits = min(4 * lengths.labelled * model.vocabulary, memory_budget)
    return Memory(
        weights=weights(model, precision, one_layer_at_a_time=False),
        head=logits + lengths.labelled * model.hidden * item,
        layer=feed_forward(model, lengths, item) + lengths.keys * 2 * item * model.keys,
    )


def rollout_memory(
    model: Model, room: Room, precision: Precision, *, shards: int = 1, adapters: bool = False
) -> Memory:
    """The memory of sampling on one device, next to masters and optimizer. It is given back before the update.

    shards: processes that share the model, each of which samples from a whole copy. adapters: whether they are merged
    into one.
    """
    item = (precision.autocast or precision.weights).itemsize
    row = Lengths(tokens=TOKENS_PER_ROW, keys=TOKENS_PER_ROW, labelled=0)
    copied = shards > 1 or adapters or precision.autocast is not None
    # Parts of a model in half precision are its masters.
    own = 0 if precision.half and shards > 1 else model.parameters * precision.weights.itemsize // shards
    return Memory(
        weights=own + (model.parameters * item if copied else 0),
        head=8 * room.slots * model.vocabulary,
        layer=feed_forward(model, row, item),
        cache=room.tokens * model.layers * 2 * model.keys * item,
    )


def element_bytes(precision: Precision) -> tuple[int, int]:
    """Bytes of a layer's two norms for each hidden element of a token, and bytes of an element of a product."""
    if precision.half:
        return 16, 2
    return (24, 4) if precision.autocast is None else (26, 2)


def weights(model: Model, precision: Precision, *, one_layer_at_a_time: bool) -> int:
    copies = 0 if precision.autocast is None else 2 * model.parameters
    return model.parameters * precision.weights.itemsize + copies // (model.layers if one_layer_at_a_time else 1)


def feed_forward(model: Model, lengths: Lengths, item: int) -> int:
    """The widest moment of a layer beyond its saved activations."""
    return lengths.tokens * item * 2 * (model.intermediate + model.hidden)
