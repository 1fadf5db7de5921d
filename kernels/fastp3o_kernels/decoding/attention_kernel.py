"""Decode attention in Triton: two launches, whatever the lengths.

    partial_attention   one program for (slot, key head, chunk of keys). A chunk of a prompt is attended by the first of
                        the slots that share the prompt, for all of them: the queries of up to K responses times the
                        G = H / Hkv heads of a group are rows of one product, the keys are read once. A chunk of a
                        response is attended by its slot, and the one that the new token falls in also stores its key
                        and value.
    merge               in merge_kernel.py; one program for (slot, head): the chunks' results weighted by logsumexp.

Chunks are of a fixed length and merged in a fixed order, so a slot's result has the same bits whatever is in the
others. What a short prompt or response or an idle slot leaves without work are programs that return at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastp3o_kernels.decoding.cache import LayerCache, Slots
from fastp3o_kernels.decoding.merge_kernel import launch_merge
from fastp3o_kernels.dispatch import INTERPRET

# Keys of one program. Its result is written and read in fp32: 8 K G D bytes beside the 1024 D of 256 keys and values in
# half precision. Shorter chunks would be more programs where prompts are few.
CHUNK = 256
# Queries of one program, by the bytes of an element: tensor cores take 16 at least, and more than these would not leave
# registers for head size 256. Only where K G is more are keys of a prompt read more than once.
SMALLEST_TILE, LARGEST_TILE = 16, {2: 64, 4: 16}
# Bytes of keys in one step of the loop: with the values, in a pipeline of three steps, 96 KiB of shared memory. And how
# many keys at most, by the bytes of an element, for the registers.
BLOCK_BYTES, LARGEST_BLOCK = 16384, {2: 64, 4: 32}


@triton.jit
def product(a, b, IN_FP32: tl.constexpr):
    """In fp32. The interpreter's product of bf16 is wrong, so there operands are widened, which is exact."""
    if IN_FP32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def scaled(products, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Logits in base 2."""
    LOG2E: tl.constexpr = 1.4426950408889634
    if HAS_SOFTCAP:
        # tanh; exp may overflow to infinity, which gives 1.
        return softcap * LOG2E * (1.0 - 2.0 / (tl.exp(products * (2.0 * scale / softcap)) + 1.0))
    return products * (scale * LOG2E)


@triton.jit(do_not_specialize=["prompts", "prompt_room", "response_room", "prompt_chunks", "chunks", "window"])
def partial_attention_kernel(
    query_ptr,  # [R, H, D], slots and heads at any stride
    key_ptr,  # [R, Hkv, D], the new tokens'
    value_ptr,
    prompt_keys_ptr,  # [P, Hkv, prompt_room, D]
    prompt_values_ptr,
    own_keys_ptr,  # [R, Hkv, response_room, D]; new keys and values are stored here
    own_values_ptr,
    prompt_ptr,  # [R] int64
    prompt_lengths_ptr,  # [R] int64
    steps_ptr,  # [R] int64
    members_ptr,  # [R, K] int32
    partials_ptr,  # [R, H, chunks, D] fp32, out
    lse_ptr,  # [R, H, chunks] fp32, out, base 2
    query_slot_stride,
    query_head_stride,
    key_slot_stride,
    key_head_stride,
    value_slot_stride,
    value_head_stride,
    prompts,
    prompt_room,
    response_room,
    prompt_chunks,
    chunks,
    scale,
    softcap,
    window,
    K: tl.constexpr,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # Offsets pass 2^31; those inside one prompt or response do not, and cost fewer registers in 32 bits.
    slot = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    prompt = tl.load(prompt_ptr + slot)
    if prompt >= prompts:
        return
    length = tl.load(prompt_lengths_ptr + slot).to(tl.int32)
    step = tl.load(steps_ptr + slot).to(tl.int32)

    # Which keys, and the queries of which slots.
    PROMPT_TILES: tl.constexpr = (K * G + BLOCK_M - 1) // BLOCK_M
    OWN_TILES: tl.constexpr = (G + BLOCK_M - 1) // BLOCK_M
    m = tl.arange(0, BLOCK_M)
    shared = part < prompt_chunks * PROMPT_TILES
    if shared:
        chunk = part // PROMPT_TILES
        first = chunk * CHUNK
        m += part % PROMPT_TILES * BLOCK_M
        member = tl.load(members_ptr + slot * K + m // G, mask=m < K * G, other=-1).to(tl.int64)
        cached = length
        before = tl.zeros_like(length)
        offset = (prompt * HKV + head) * prompt_room * D
        keys_ptr, values_ptr = prompt_keys_ptr + offset, prompt_values_ptr + offset
    else:
        part -= prompt_chunks * PROMPT_TILES
        chunk = prompt_chunks + part // OWN_TILES
        first = part // OWN_TILES * CHUNK
        m += part % OWN_TILES * BLOCK_M
        member = tl.where(m < G, slot, -1)
        cached = step
        before = length
        offset = (slot * HKV + head) * response_room * D
        keys_ptr, values_ptr = own_keys_ptr + offset, own_values_ptr + offset
    # The new token is the last of its response, behind those in the cache.
    newest = (not shared) & (first <= step) & (step < first + CHUNK)
    if ((first >= cached) & (not newest)) | (tl.max(member, axis=0) < 0):
        return
    live = member >= 0
    member = tl.where(live, member, 0)
    heads = head * G + m % G
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    of_queries = live[:, None] & inside[None, :]
    queries = query_ptr + member[:, None] * query_slot_stride + heads[:, None] * query_head_stride + d[None, :]
    q = tl.load(queries, mask=of_queries, other=0.0)

    running_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if newest:
        key = tl.load(key_ptr + slot * key_slot_stride + head * key_head_stride + d, mask=inside, other=0.0)
        value = tl.load(value_ptr + slot * value_slot_stride + head * value_head_stride + d, mask=inside, other=0.0)
        tl.store(own_keys_ptr + offset + step * D + d, key, mask=inside)
        tl.store(own_values_ptr + offset + step * D + d, value, mask=inside)
        products = tl.sum(q.to(tl.float32) * key.to(tl.float32)[None, :], axis=1)
        running_max = scaled(products, scale, softcap, HAS_SOFTCAP)
        total += 1.0
        result += value.to(tl.float32)[None, :]

    last = tl.minimum(first + CHUNK, cached)
    start = first
    if HAS_WINDOW:
        position = tl.load(prompt_lengths_ptr + member) + tl.load(steps_ptr + member)
        least = (position - window + 1 - before).to(tl.int32)
        # Blocks before any row's window are left out. That some are read for other rows changes no bit of a row's.
        least_of_all = tl.min(tl.where(live, least, last), axis=0)
        start = tl.maximum(start, least_of_all // BLOCK_N * BLOCK_N)
    # The interpreter of triton 3.6 takes no bounds from run time, which is what it makes of every variable.
    for block in range(0, CHUNK // BLOCK_N if INTERPRETED else tl.cdiv(last - start, BLOCK_N)):
        n = start + block * BLOCK_N + tl.arange(0, BLOCK_N)
        stored = (n < last)[:, None] & inside[None, :]
        k = tl.load(keys_ptr + n[:, None] * D + d[None, :], mask=stored, other=0.0)
        logits = scaled(product(q, tl.trans(k), INTERPRETED), scale, softcap, HAS_SOFTCAP)
        visible = (n < last)[None, :]
        if HAS_WINDOW:
            visible = visible & (n[None, :] >= least[:, None])
        logits = tl.where(visible, logits, -float("inf"))
        new_max = tl.maximum(running_max, tl.max(logits, axis=1))
        # As long as no key was visible there is no maximum to subtract.
        base = tl.where(new_max == -float("inf"), 0.0, new_max)
        weights = tl.exp2(logits - base[:, None])
        decay = tl.exp2(running_max - base)
        total = total * decay + tl.sum(weights, axis=1)
        v = tl.load(values_ptr + n[:, None] * D + d[None, :], mask=stored, other=0.0)
        result = result * decay[:, None] + product(weights.to(v.dtype), v, INTERPRETED)
        running_max = new_max

    some = total > 0
    total = tl.where(some, total, 1.0)
    out = (member * HKV * G + heads) * chunks + chunk
    tl.store(lse_ptr + out, tl.where(some, running_max + tl.log2(total), -float("inf")), mask=live)
    tl.store(partials_ptr + out[:, None] * D + d[None, :], result / total[:, None], mask=of_queries)


def block_sizes(D: int, K: int, G: int, element_bytes: int) -> dict[str, int]:
    block_d = max(triton.next_power_of_2(D), 16)
    return {
        "BLOCK_M": min(max(triton.next_power_of_2(K * G), SMALLEST_TILE), LARGEST_TILE[element_bytes]),
        "BLOCK_N": min(max(BLOCK_BYTES // (block_d * element_bytes), 16), LARGEST_BLOCK[element_bytes]),
        "BLOCK_D": block_d,
    }


def warps(blocks: dict[str, int], element_bytes: int) -> int:
    """More where 128 threads would not have registers for sums or, in fp32, for the operands of products."""
    return 8 if element_bytes == 4 or blocks["BLOCK_M"] * blocks["BLOCK_D"] >= 8192 else 4


def launch_decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    slots: Slots,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """As `decoding.attention.decode_attention`; two launches."""
    R, H, D = query.shape
    P, Hkv, Lp, _ = cache.prompt_keys.shape
    Lr = cache.own_keys.shape[2]
    K, G = slots.responses_per_prompt, H // Hkv
    if not all(tensor.is_contiguous() for tensor in vars(cache).values()):
        raise ValueError("the cache's keys and values must be contiguous")
    query, key, value = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (query, key, value))
    prompt_chunks, own_chunks = triton.cdiv(Lp, CHUNK), triton.cdiv(Lr, CHUNK)
    chunks = prompt_chunks + own_chunks
    partials = torch.empty(R, H, chunks, D, dtype=torch.float32, device=query.device)
    lse = torch.empty(R, H, chunks, dtype=torch.float32, device=query.device)
    blocks = block_sizes(D, K, G, query.element_size())
    programs = prompt_chunks * triton.cdiv(K * G, blocks["BLOCK_M"]) + own_chunks * triton.cdiv(G, blocks["BLOCK_M"])
    with torch.cuda.device_of(query):
        partial_attention_kernel[(R, Hkv, programs)](
            query,
            key,
            value,
            cache.prompt_keys,
            cache.prompt_values,
            cache.own_keys,
            cache.own_values,
            slots.prompt,
            slots.prompt_lengths,
            slots.steps,
            slots.members,
            partials,
            lse,
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            P,
            Lp,
            Lr,
            prompt_chunks,
            chunks,
            scale,
            1.0 if softcap is None else softcap,
            0 if window is None else window,
            K=K,
            G=G,
            HKV=Hkv,
            D=D,
            CHUNK=CHUNK,
            **blocks,
            HAS_SOFTCAP=softcap is not None,
            HAS_WINDOW=window is not None,
            INTERPRETED=INTERPRET,
            num_warps=warps(blocks, query.element_size()),
        )
    return launch_merge(partials, lse, slots, P, prompt_chunks, CHUNK, query.dtype)
