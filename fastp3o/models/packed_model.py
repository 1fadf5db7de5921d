"""Policy, reference or reward model over packed rows: hidden states -> log-probabilities, loss or
scores.

D hidden size; a row has T tokens, S responses and N labeled tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from types import MethodType
from typing import Any, TypeVar, cast

import torch
import torch.fx.experimental._config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.logging import get_logger

from fastp3o.errors import UserError
from fastp3o.models import attention
from fastp3o.models.attention import KeyValueCache
from fastp3o.models.fused_layers import fuse, without_replaced_parts
from fastp3o.packing.packed_row import PackedRow, Part, Segments
from fastp3o_kernels import Head, VocabularyShard, linear_logprobs
from fastp3o_kernels.exposed_head import model_head
from fastp3o_kernels.onednn import use_onednn

Result = TypeVar("Result")
logger = get_logger(__name__)


# --- the model ------------------------------------------------------------------------------------


class PackedModel(nn.Module):
    """A transformers model over packed rows: its body, then a function of some hidden states and
    the head.

    All happens within one forward call, which gathers a sharded model's weights. Only that function
    computes logits. relative_positions: whether only differences of positions count.
    longest_sequence: tokens that prompt and response may take together, None for no limit.
    temperature: divides the logits, next to what the model's configuration says: the policy is
    softmax(logits / temperature) in all that is computed of it. A copy of the model keeps it.
    cut_over: the processes that have parts of its layers, one dimension; None where they are whole.
    shard: of its head then. mergeable: whether weights with its adapters merged would be the same
    policy.
    """

    temperature: float = 1.0
    cut_over: DeviceMesh | None = None
    shard: VocabularyShard | None = None
    mergeable: bool = True

    def __init__(self, model: PreTrainedModel):
        """Raises ValueError if the model, or another one with the same configuration, is in a
        PackedModel already.
        """
        super().__init__()
        if model.config._attn_implementation == attention.NAME:
            raise UserError(
                "the model, or another with the same configuration object, is in a PackedModel already"
            )
        self.model = model
        self.relative_positions = end_of_positions(model.config) is None
        self.longest_sequence = longest_sequence(model.config)
        self.compiled = False
        # transformers' SDPA ignores soft capping.
        softcapped = getattr(model.config, "attn_logit_softcapping", None)
        self.own_attention = "eager" if softcapped else model.config._attn_implementation
        model.set_attn_implementation(attention.NAME)
        if model.device.type == "cpu":
            use_onednn(model.base_model)
        fuse(cast(nn.Module, model.base_model), self.stack())
        # transformers' look for padding waits for the device in every pass, and packed rows have
        # none.
        cast(Any, model.base_model).warn_if_padding_and_no_attention_mask = lambda *_: None

    def forward(
        self, row: PackedRow, at: Tensor, compute: Callable[[Tensor, Head], Result]
    ) -> Result:
        """`compute` of the hidden states [n, D] at the tokens `at` [n] of the row, and of the head.
        Raises ValueError for a sequence that is longer than the model's positions reach.
        """
        self.check_reach(row.segments.longest_keys)
        trains = torch.is_grad_enabled()
        with nullcontext() if trains or not self.compiled else as_in_training():
            if row.passes == 1:
                hidden = self.hidden_states(row.input_ids, row.position_ids, segments=row.segments)
            else:
                hidden = self.hidden_states_in_parts(row)
        return compute((hidden if trains else hidden.detach())[at], self.head())

    def hidden_states(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        segments: Segments | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """The body's results [T, D] for one row of tokens [1, T], with segments, a cache or both
        (see `segment_attention`, which gets them).
        """
        arguments = {"fastp3o_segments": segments, "fastp3o_cache": cache}
        ours = {name: value for name, value in arguments.items() if value is not None}
        output = self.model.base_model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **ours
        )
        return output.last_hidden_state.squeeze(0)

    def hidden_states_in_parts(self, row: PackedRow) -> Tensor:
        """[T, D], one part of a group at a time. The backward pass recomputes the activations of
        each part, so that only one part's are in memory.
        """
        parts = row.parts or (row,)
        states = []
        for number in range(row.passes):
            part = parts[min(number, len(parts) - 1)]
            hidden = checkpoint(
                self.hidden_states,
                part.input_ids,
                part.position_ids,
                segments=part.segments,
                use_reentrant=False,
            )
            if number < len(parts):
                states.append(hidden[part.again if isinstance(part, Part) else 0 :])
            else:
                # Made only to be in step with other processes.
                states[-1] = states[-1] + 0.0 * hidden[:1]
        return torch.cat(states)

    def check_reach(self, tokens: int, *, context: int = 0) -> None:
        """Raises ValueError if positions end before so many tokens of prompt and response, after
        those of a context.
        """
        tokens += context
        if self.longest_sequence is not None and tokens > self.longest_sequence:
            before = f"a context of {context} tokens, " if context else ""
            name = f"{type(self.model).__name__} ({self.model.name_or_path or 'in memory'})"
            long = f"take up to {tokens} tokens together"
            remedy = "lower --max_prompt_tokens or --max_response_tokens"
            end = f"the positions of {name} end at {self.longest_sequence}"
            raise UserError(f"{before}prompt and response {long}, and {end}: {remedy}")

    def recompute_activations(self) -> None:
        """Gradient checkpointing: the backward pass computes each layer's activations again."""
        # The name before transformers 5.23, which warns of it.
        old = self.model.gradient_checkpointing_enable
        getattr(self.model, "activation_checkpointing_enable", old)({"use_reentrant": False})

    def compile_layers(self) -> None:
        """Lets torch compile the layers for packed rows and steps, at the first one: norms, rotary
        positions, gates and residuals, which cost a pass over memory each, become few kernels.
        `generate` runs them as they are.
        """
        logger.warning_once(
            "compiling layers: a minute or so, and seconds once torch has them on disk"
        )
        # Each kind of layer and of row takes a version.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        # Sizes that are equal by chance must not be taken for the same.
        torch.fx.experimental._config.use_duck_shape = False
        for layer in self.layers():
            without_replaced_parts(layer)
            # An attribute, unlike torch's `Module.compile`, leaves hooks as they are.
            vars(layer)["forward"] = MethodType(compiled_forward, layer)
        self.compiled = True

    @contextmanager
    def with_own_attention(self) -> Iterator[PreTrainedModel]:
        """Within the block, the model has transformers' attention, for rectangular batches as
        `generate` makes.
        """
        self.model.set_attn_implementation(self.own_attention)
        try:
            yield self.model
        finally:
            self.model.set_attn_implementation(attention.NAME)

    def layers(self) -> nn.ModuleList:
        """The layers of the body, from the lowest. Raises ValueError if there is no list of as many
        layers as the configuration says.
        """
        if (stack := self.stack()) is None:
            count = self.model.config.get_text_config().num_hidden_layers
            raise UserError(
                f"{type(self.model.base_model).__name__} has no list of {count} layers, which tells them apart"
            )
        return stack

    def stack(self) -> nn.ModuleList | None:
        """The list of layers, or None."""
        count = self.model.config.get_text_config().num_hidden_layers
        lists = (
            module
            for module in self.model.base_model.modules()
            if isinstance(module, nn.ModuleList)
        )
        return next((module for module in lists if len(module) == count), None)

    def head(self) -> Head:
        """The head, with the temperature. Raises ValueError if it is not plain linear, as with a
        LoRA adapter.
        """
        try:
            head = model_head(self.model)
        except ValueError as error:
            raise UserError(str(error)) from error
        if self.shard is not None:
            weight, bias = cast(DTensor, head.weight), cast(DTensor | None, head.bias)
            head = replace(
                head,
                weight=weight.to_local(grad_placements=weight.placements),
                bias=None
                if bias is None
                else bias.to_local(grad_placements=[Partial()])[self.shard.first :][
                    : self.shard.rows
                ],
                shard=self.shard,
            )
        return (
            head
            if self.temperature == 1
            else replace(head, temperature=head.temperature * self.temperature)
        )


# --- layers that are compiled ---------------------------------------------------------------------


def eager_forward(layer, *args, **kwargs):
    return type(layer).forward(layer, *args, **kwargs)


@cache
def compiled() -> Callable[..., Any]:
    return torch.compile(eager_forward, dynamic=True)


def compiled_forward(layer, *args, **kwargs):
    """A layer's forward. All layers of a kind share the compiled code; a copy of a layer calls its
    own forward.
    """
    packed = any(name.startswith("fastp3o_") for name in kwargs)
    return (compiled() if packed else eager_forward)(layer, *args, **kwargs)


# --- modes ----------------------------------------------------------------------------------------


@contextmanager
def as_in_training() -> Iterator[None]:
    """Runs the code that is compiled for training without keeping activations. Inference code
    rounds otherwise, so that ratios to old log-probs would not start at exactly one.
    """
    nothing = cast(Any, lambda _: None)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(nothing, nothing):
        yield


@contextmanager
def evaluation_mode(model: PackedModel) -> Iterator[None]:
    """Within the block the model is in evaluation mode: dropout is off, and keys and values can be
    cached, which gradient checkpointing prevents.
    """
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def untempered(model: PackedModel) -> Iterator[None]:
    """Within the block, the model has temperature 1."""
    temperature, model.temperature = model.temperature, 1.0
    try:
        yield
    finally:
        model.temperature = temperature


# --- how long a sequence may be -------------------------------------------------------------------


def longest_sequence(config: PretrainedConfig) -> int | None:
    """The longest sequence in tokens: what the positions allow, or else what the configuration
    declares. Rotary positions continue beyond the lengths that the model was trained on, but its
    predictions there are useless.
    """
    end = end_of_positions(config)
    config = config.get_text_config()
    declared = getattr(config, "max_position_embeddings", None)
    if end is not None or declared is None:
        return end
    scaled = [
        kind.get("factor", 1) * kind.get("original_max_position_embeddings", 0)
        for kind in rope_kinds(config)
    ]
    return int(max(declared, *scaled))


def end_of_positions(config: PretrainedConfig) -> int | None:
    """Number of tokens for which positions are defined; None for no limit. Absolute position
    embeddings end. Dynamic and longrope rotary positions change once a sequence is longer than the
    original length, and with them those of its neighbors in the row.
    """
    config = config.get_text_config()
    kinds = rope_kinds(config)
    if not kinds:
        return getattr(config, "max_position_embeddings", None)
    changing = [kind for kind in kinds if kind.get("rope_type") in ("dynamic", "longrope")]
    ends = (
        kind.get("original_max_position_embeddings", config.max_position_embeddings)
        for kind in changing
    )
    return min(ends, default=None)


def rope_kinds(config: PretrainedConfig) -> list[dict]:
    """Parameters of rotary positions, one for each kind of layer that has its own."""
    rope = getattr(config, "rope_parameters", None)
    return [kind for kind in rope.values() if isinstance(kind, dict)] or [rope] if rope else []


# --- what the head says of a row ------------------------------------------------------------------


def labeled_logprobs(model: nn.Module, row: PackedRow) -> Tensor:
    """Log-probabilities of a row's labeled tokens, [N] fp32; differentiable."""
    return model(row, row.labeled_at, lambda hidden, head: label_logprobs(hidden, head, row))


def label_logprobs(hidden: Tensor, head: Head, row: PackedRow) -> Tensor:
    """`labeled_logprobs` from the hidden states [N, D] that predict the labels."""
    return linear_logprobs(hidden, head, row.labels, **chunk_options(row))


def label_entropies(hidden: Tensor, head: Head, row: PackedRow) -> tuple[Tensor, Tensor]:
    """`label_logprobs`, and the entropy of each prediction, in nats; differentiable."""
    outputs = linear_logprobs(hidden, head, row.labels, outputs=("entropy",), **chunk_options(row))
    assert outputs.entropy is not None
    return outputs.logprobs, outputs.entropy


def chunk_options(row: PackedRow) -> dict[str, Any]:
    """Options that cut chunks of logits between prompts, as the losses do: the same chunks give the
    same bits.
    """
    K = row.responses_per_prompt or 1
    return {"cu_seqlens": row.cu_seqlens_on_host if K > 1 else None, "responses_per_prompt": K}


def scores(model: nn.Module, row: PackedRow) -> Tensor:
    """A reward model's score of each response of a row, read at its last token, [S] fp32."""
    return model(row, row.ends_at, lambda hidden, head: scalars(hidden, head.weight))


def vectors(model: nn.Module, row: PackedRow) -> Tensor:
    """A preference model's vector of each response of a row, read where scores are, [S, 2k] fp32."""
    return model(row, row.ends_at, lambda hidden, head: outputs(hidden, head.weight))


def scalars(hidden: Tensor, weight: Tensor) -> Tensor:
    """One number for each hidden state, in fp32 in every precision: [N, D], [1, D] -> [N]."""
    # A sum, since squeezing gives a view, whose hooks FSDP could lose.
    return outputs(hidden, weight).sum(1)


def outputs(hidden: Tensor, weight: Tensor) -> Tensor:
    """Outputs of a small head, in fp32 in every precision: [N, D], [n, D] -> [N, n]."""
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.float(), weight.float())
