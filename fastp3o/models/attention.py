"""Attention over the segments of a packed row, for any transformers model: flash_attn, torch's
varlen_attn, or SDPA.

The first backend that supports a call computes it. All are causal, aligned at the end of a
segment's keys, with grouped heads and a sliding window.

    flash_attn     fp16 and bf16 on a GPU from compute capability 8.0 on, installed or from the hub; has soft capping
    varlen_attn    the same, part of torch, with its own kernels or those of flash-attn 3 or 4; no soft capping
    SDPA           any dtype and device, one kernel for each segment

Rollouts go the same way, with a cache of keys and values in place of segments (`fastp3o.rollouts`).

T tokens (queries), U keys, H heads (Hkv of keys), D size of a head.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from math import prod
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.utils.logging import get_logger

from fastp3o.config import AttentionName
from fastp3o.errors import UserError
from fastp3o.packing.packed_row import Segments

try:
    from flash_attn import flash_attn_varlen_func as installed_flash_attn
except ImportError:
    installed_flash_attn = None
flash_attn_varlen_func = installed_flash_attn

logger = get_logger(__name__)
# transformers treats names with "flash" specially. For a name without a mask function it makes no
# mask, and does not wait for the device in every pass to see whether positions begin again
# somewhere.
NAME = "fastp3o_segments"
# Head size that both libraries take.
LARGEST_HEAD = 256
LEAST_CAPABILITY = (8, 0)
HOPPER = (9, 0)
# Commits with builds for these versions of torch alone, before huggingface/kernels-community's
# issue 1085: no gradients of groups. What has later builds is a branch whose code changes.
OLDEST_OF_HUB, NEWEST_OF_HUB = (2, 11), (2, 13)
FLASH_ATTN_2 = "kernels-community/flash-attn2", "db6b51744f0cd7061386442c09df890fc6d9f47e"
FLASH_ATTN_3 = "kernels-community/flash-attn3", "43f0bd269777115d94ff826e0d113ce9c1c9087b"
# Elements of a segment's queries up to which a CPU pads all segments of a row to its longest, and
# computes them in one call: it takes less time than the calls for each.
LARGEST_PADDED = 2**13
# Products of queries and keys that are in memory at once, where a kernel does not hide them.
LARGEST_BLOCK = 2**24


# --- attention of a layer over segments -----------------------------------------------------------


class KeyValueCache(Protocol):
    """Keys and values of the prompts and responses of rollouts, by layer."""

    def store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the keys and values of a packed row, [T, Hkv, D]. Returns those of its segments,
        [U, Hkv, D].
        """

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attention [1, T, H, D] of tokens that each continue a response; stores their keys and
        values.

        query: [1, H, T, D]. key, value: [1, Hkv, T, D], as models produce them.
        """


def require_packed_row(
    query: Tensor, attention_mask: Tensor | None, dropout: float, *, has_place: bool
) -> None:
    """Raises UserError for what no packed row has: a mask, dropout, a batch. has_place: whether a
    layer has handed on where responses begin.
    """
    if attention_mask is not None:
        made = "it builds its own attention mask, which ignores where responses begin"
        raise UserError(
            f'{made}: attention "{NAME}" takes one packed row with its segments instead'
        )
    if not has_place:
        lost = "it does not pass its keyword arguments on to its attention"
        raise UserError(
            f'{lost}: "{NAME}" takes one packed row with its segments, and never sees these'
        )
    if len(query) != 1:
        raise UserError(f'attention "{NAME}" takes one packed row, got a batch of {len(query)}')
    if dropout:
        raise UserError(
            f"dropout of attention weights ({dropout}) would make log-probabilities random; set it to 0"
        )


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    fastp3o_segments: Segments | None = None,
    fastp3o_cache: KeyValueCache | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention that transformers calls in each layer. Models hand keywords on that they do not
    know, which have the prefix `fastp3o_`: transformers' own layers take others from one release to
    the next, such as `cache`.

    With segments, tokens attend within them, and a cache keeps keys and values. Without, all
    continue its responses.

    query: [1, H, T, D]. key, value: [1, Hkv, T, D]. scaling: of the products, 1/√D if None.
    sliding_window: keys that a query sees at most, its own included. softcap: of the scaled
    products (Gemma 2). Returns [1, T, H, D], and no weights. Raises ValueError for a batch that is
    not packed, and for dropout.
    """
    segments, cache = fastp3o_segments, fastp3o_cache
    has_place = segments is not None or cache is not None
    require_packed_row(query, attention_mask, dropout, has_place=has_place)
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
        # Rotary embeddings leave queries and keys in fp32, while values are in half precision.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = cast(int, getattr(module, "layer_idx", None))
    if segments is None:
        assert cache is not None
        return cache.attend(
            layer, query, key, value, scale=scale, window=sliding_window, softcap=softcap
        ), None
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    if cache is not None:
        key, value = cache.store(layer, key, value)
    if segments.shared is not None:
        key, value = (GatherKeys.apply(tensor, segments.shared) for tensor in (key, value))
    attend = fastest_backend(query, softcap)
    with torch.autocast(query.device.type, enabled=False):
        return attend(query, key, value, segments, scale, sliding_window, softcap).unsqueeze(
            0
        ), None


uncompiled = torch.compiler.disable(segment_attention)


def compilable_attention(*args, **options):
    """`segment_attention` for compiled layers; where a cache changes during the call, the compiler
    leaves it out.
    """
    return (segment_attention if options.get("fastp3o_cache") is None else uncompiled)(
        *args, **options
    )


AttentionInterface.register(NAME, compilable_attention)


# --- which kernel ---------------------------------------------------------------------------------


def choose_attention(name: AttentionName, device: torch.device) -> None:
    """Chooses the attention kernels of all models in this process. Raises UserError if they are not
    available or cannot run here.
    """
    global flash_attn_varlen_func
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()
    flash_attn_varlen_func = installed_flash_attn
    if name == "auto":
        return
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability < (LEAST_CAPABILITY if name == "hub" else HOPPER):
        raise UserError(
            f"--attention {name} needs a GPU, of compute capability 9.0 for fa3 and fa4, and 8.0 for hub"
        )
    try:
        if name == "hub":
            flash_attn_varlen_func = flash_attn_of_hub(
                *(FLASH_ATTN_3 if capability == HOPPER else FLASH_ATTN_2)
            )
        else:
            activate_flash_attention_impl(name.upper())
            flash_attn_varlen_func = None
    except Exception as error:
        # whatever a package raises that is missing, or built for another torch
        raise UserError(f"--attention {name}: {error}") from error


def flash_attn_of_hub(repository: str, revision: str) -> Callable[..., Any]:
    """Loads flash_attn_varlen_func from the hub. Raises UserError if there is no build for this
    torch, or if the package that downloads builds is missing.
    """
    major, minor, _ = torch.__version__.split(".", 2)
    if not OLDEST_OF_HUB <= (int(major), int(minor)) <= NEWEST_OF_HUB:
        oldest, newest = (f"{major}.{minor}" for major, minor in (OLDEST_OF_HUB, NEWEST_OF_HUB))
        had = f"{repository} has builds for torch {oldest} to {newest}, and this is {torch.__version__}"
        raise UserError(
            f"{had}; --attention auto takes flash-attn, if it is installed, or torch's kernels"
        )
    try:
        from kernels import get_kernel  # type: ignore[attr-defined]  # a clone has a folder of that name
    except ImportError as error:
        raise UserError(
            f"the package `kernels` is missing ({error}): pip install '.[flash]'"
        ) from error
    return get_kernel(repository, revision=revision).flash_attn_varlen_func


def fastest_backend(query: Tensor, softcap: float | None):
    """The first backend that supports these inputs."""
    half = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    if half and query.shape[-1] <= LARGEST_HEAD and libraries_support(query.device):
        if flash_attn_varlen_func is not None:
            return by_flash_attn
        if softcap:
            logger.warning_once(
                "This model caps its attention's products, and without flash-attn segments are computed one by one: "
                "--attention hub takes it from the Hugging Face Hub (pip install '.[flash]')."
            )
        elif query.shape[-1] % 8 == 0:
            return by_varlen_attn
    return sdpa_per_segment


@torch.compiler.assume_constant_result  # a compiler asks, and does not look into it
@cache
def libraries_support(device: torch.device) -> bool:
    """Whether the GPU is new enough for both libraries. Warns if it is not."""
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        logger.warning(
            f"Attention computes segments one by one: flash-attn and torch's varlen_attn need a GPU of compute "
            f"capability 8.0, and this one has {'.'.join(map(str, capability))}."
        )
    return capability >= LEAST_CAPABILITY


# --- kernels of flash-attn and of PyTorch ---------------------------------------------------------


def by_flash_attn(query, key, value, segments, scale, window, softcap):
    lengths = segments.cu_queries, segments.cu_keys, segments.longest_query, segments.longest_keys
    result = flash_attn_varlen_func(
        query,
        key,
        value,
        *lengths,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    # Some builds of flash-attn 3 return sums, too.
    return result[0] if isinstance(result, tuple) else result


@torch.compiler.assume_constant_result
@cache
def names_grouped_heads(function: Callable) -> bool:
    """Whether the function has an argument for grouped heads, as torch's has from 2.13 on. Older
    kernels handle them without it. Repeating the keys instead would keep the copies in memory for
    the backward pass: eight times as much with eight heads a group.
    """
    return "enable_gqa" in inspect.signature(function).parameters


def by_varlen_attn(query, key, value, segments, scale, window, softcap):
    options: dict[str, Any] = {"enable_gqa": True} if names_grouped_heads(varlen_attn) else {}
    lengths = segments.cu_queries, segments.cu_keys, segments.longest_query, segments.longest_keys
    window_size = (-1 if window is None else window - 1, 0)
    return varlen_attn(query, key, value, *lengths, scale=scale, window_size=window_size, **options)


# --- PyTorch's own attention, where there is no kernel --------------------------------------------


class GatherKeys(torch.autograd.Function):
    """Gathers the keys of all segments from those of the tokens, [T, Hkv, D] -> [U, Hkv, D].
    Backward adds gradients in a fixed order, so that they are deterministic.
    """

    @staticmethod
    def forward(ctx, tokens, shared):
        ctx.shared = shared
        return tokens[shared.tokens]

    @staticmethod
    def backward(ctx, grad_keys):
        grad = grad_keys[ctx.shared.own]
        for tokens, keys in ctx.shared.repeats:
            grad.index_add_(0, tokens, grad_keys[keys])
        return grad, None


# The number of segments differs from row to row, so a compiler would look into it again and again.
@torch.compiler.disable
def sdpa_per_segment(query, key, value, segments: Segments, scale, window, softcap):
    longest, plain = segments.longest_keys, not softcap and not query.is_cuda
    if (
        plain
        and longest * query[0].numel() <= LARGEST_PADDED
        and (window is None or window >= longest)
    ):
        return sdpa_of_padded(query, key, value, segments, scale)
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    # Splitting, unlike slicing, adds up the pieces' gradients in one operation.
    keys, values = (tensor.split(segments.key_lengths, dim=2) for tensor in (key, value))
    pieces = zip(query.split(segments.query_lengths, dim=2), keys, values, strict=True)
    attend: Callable[..., Tensor] = with_softcap if softcap else with_sdpa
    if softcap or query.is_cuda:
        # The backward pass computes a block's products again: kept, they would take memory by the
        # square of its length.
        recomputed: dict[str, Any] = {
            "use_reentrant": False,
            "preserve_rng_state": False,
            "determinism_check": "none",
        }
        attend = partial(checkpoint, attend, **recomputed)
    blocks = (block for piece in pieces for block in causal_blocks(*piece, window, softcap))
    return torch.cat([attend(*block, scale, window, softcap) for block in blocks], dim=2)[
        0
    ].transpose(0, 1)


def sdpa_of_padded(query, key, value, segments: Segments, scale):
    """Attention of all segments as one padded batch. Queries keep the positions of their own keys,
    so that they see the keys before them and never the padding, which comes after.
    """
    queries_at, keys_at = segments.padded_places
    places = (queries_at, keys_at, keys_at)
    shape = (len(segments.key_lengths), segments.longest_keys)
    query, key, value = (
        tensor.new_zeros(prod(shape), *tensor.shape[1:])
        .index_copy(0, at, tensor)
        .unflatten(0, shape)
        .transpose(1, 2)
        for tensor, at in zip((query, key, value), places, strict=True)
    )
    result = with_sdpa(query, key, value, scale, None, None)
    return result.transpose(1, 2).flatten(0, 1).index_select(0, queries_at)


def causal_blocks(query, key, value, window, softcap) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """A segment [1, H, n, D] in blocks of queries with the keys that they see. A block bounds what
    is [queries, keys]: the products of all heads with a softcap, else a mask; a whole segment needs
    none.
    """
    _, heads, queries, _ = query.shape
    keys = key.shape[2]
    size = queries
    if softcap or not is_whole(queries, keys, window):
        products = keys * heads if softcap else keys  # of one query
        size = max(1, LARGEST_BLOCK // products)
    end = keys - queries  # of the keys that the block before this one sees
    for block in query.split(size, dim=2):
        first = 0 if window is None else max(0, end - window + 1)
        end += block.shape[2]
        yield block, key[:, :, first:end], value[:, :, first:end]


def is_whole(queries: int, keys: int, window: int | None) -> bool:
    return queries == keys and (window is None or window >= keys)


def with_sdpa(query, key, value, scale, window, softcap):
    (_, heads, queries, _), (_, key_heads, keys, _) = query.shape, key.shape
    whole = is_whole(queries, keys, window)
    if query.is_cuda and heads != key_heads:
        # There torch's kernel for fp32 and old GPUs takes no groups, and one that keeps all
        # products would serve.
        key, value = (
            tensor.repeat_interleave(heads // key_heads, dim=1) for tensor in (key, value)
        )
    mask = None if whole else visible(queries, keys, window, query.device)
    options = {"scale": scale, "enable_gqa": heads != key_heads}
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=whole, **options)


def with_softcap(query, key, value, scale, window, softcap):
    mask = visible(query.shape[2], key.shape[2], window, query.device).log()
    return softcapped(query, key, value, mask, scale, softcap)


def softcapped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float
) -> Tensor:
    """[.., H, T, D], [.., Hkv, U, D] twice, [.., T, U] of 0 and -inf -> [.., H, T, D]."""
    key, value = (
        tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], dim=-3)
        for tensor in (key, value)
    )
    precise = torch.promote_types(query.dtype, torch.float32)
    products = softcap * torch.tanh(query @ key.transpose(-1, -2) * (scale / softcap))
    return (products + mask).softmax(-1, dtype=precise).to(value.dtype) @ value


def visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys] bool: whether a query sees a key. The last query and key are at the same
    position.
    """
    everything = torch.ones(queries, keys, dtype=torch.bool, device=device)
    past = everything.tril(keys - queries)
    return past if window is None else past.triu(keys - queries - window + 1)
