"""Decode attention in Triton: two launches, whatever the lengths.

    partial_attention_kernel   one program for (slot, key head, chunk of keys). The last of the slots that share a
                               prompt attends the chunks of the prompt for all of them: the queries of up to K responses
                               times the G = H / Hkv heads of a group are rows of one product, so keys are read once.
                               Each slot attends the chunks of its own response. The program whose chunk the new token
                               falls in also stores the token's key and value.
    merge_kernel               one program for (slot, head): averages the chunks' results, weighted by their logsumexp.

Chunks have a fixed length and are merged in a fixed order, so the bits of a slot's result do not
depend on the other slots. Programs without work (short prompts and responses, idle slots) return at
once. R slots, P prompts, K responses to each, H heads (Hkv of keys), D the size of a head. Logits
and logsumexp are in base 2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastp3o_kernels.decoding.cache import LayerCache, Slots
from fastp3o_kernels.operation import INTERPRET

# Keys of one program. It writes its result in fp32 and merge_kernel reads it: 8 K G D bytes, next
# to 1024 D bytes for 256 keys and values in half precision. Shorter chunks would mean more programs
# where prompts are few.
CHUNK = 256
# Queries of one program, by the bytes of an element. Tensor cores take at least 16, and with more
# than the largest tile registers would not suffice for head size 256. Keys of a prompt are read
# more than once only if K G is larger.
SMALLEST_TILE, LARGEST_TILE = 16, {2: 64, 4: 16}
# Bytes of keys in one step of the loop: with the values, in a pipeline of three steps, 96 KiB of
# shared memory. Half of it next to queries of more bytes: a block on GPUs of compute capability
# 8.6, 8.9 and 12.0 has 99 KiB. And the largest number of keys, by the bytes of an element, for the
# registers.
BLOCK_BYTES, LARGEST_BLOCK = 16384, {2: 64, 4: 32}
# Chunks that a program of merge_kernel reads at once, and its warps: chunks are few, programs many
# and small.
MERGE_BLOCK, MERGE_WARPS = 8, 1
INTERPRETED = tl.constexpr(INTERPRET)


@triton.jit
def product(a, b):
    """a @ b in fp32. The interpreter's product of bf16 is wrong, so there operands are widened,
    which is exact.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def scaled_logits(products, scale, softcap):
    LOG2E: tl.constexpr = 1.4426950408889634
    if softcap is not None:
        # tanh; exp may overflow to infinity, which gives 1.
        return softcap * LOG2E * (1.0 - 2.0 / (tl.exp(products * (2.0 * scale / softcap)) + 1.0))
    return products * (scale * LOG2E)


@triton.jit
def raised_max(running_max, block_max):
    """The maximum so far, what to subtract from logits, and the factor that brings earlier sums to
    the new maximum.
    """
    new_max = tl.maximum(running_max, block_max)
    # While every logit was -inf there is no maximum to subtract.
    base = tl.where(new_max == -float("inf"), 0.0, new_max)
    return new_max, base, tl.exp2(running_max - base)


@triton.jit
def tile(part, rows: tl.constexpr, BLOCK_M: tl.constexpr):
    """The chunk and the first row of the part-th program, where each chunk has this many rows in
    tiles of BLOCK_M.
    """
    TILES: tl.constexpr = (rows + BLOCK_M - 1) // BLOCK_M
    return part // TILES, part % TILES * BLOCK_M


@triton.jit
def store_token(new, own, d, inside):
    """Copies the new token's key or value, [D], to the cache, and returns it."""
    token = tl.load(new + d, mask=inside, other=0.0)
    tl.store(own + d, token, mask=inside)
    return token


@triton.jit(
    do_not_specialize=[
        "prompts",
        "prompt_room",
        "response_room",
        "prompt_chunks",
        "chunks",
        "window",
    ]
)
def partial_attention_kernel(
    query_ptr,  # [R, H, D], slots and heads at any stride
    key_ptr,  # [R, Hkv, D], of the new tokens
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
    lse_ptr,  # [R, H, chunks] fp32, out
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
    softcap,  # None: products are not capped
    window,  # None: a token sees all keys before it
    K: tl.constexpr,
    G: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Offsets pass 2^31; those inside one prompt or response do not, and cost fewer registers in 32
    # bits.
    slot = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    prompt = tl.load(prompt_ptr + slot)
    if prompt >= prompts:
        return
    length = tl.load(prompt_lengths_ptr + slot).to(tl.int32)
    step = tl.load(steps_ptr + slot).to(tl.int32)

    # Which keys, and the queries of which slots (members).
    prompt_parts = prompt_chunks * ((K * G + BLOCK_M - 1) // BLOCK_M)
    m = tl.arange(0, BLOCK_M)
    shared = part < prompt_parts
    if shared:
        chunk, row = tile(part, K * G, BLOCK_M)
        m += row
        first = chunk * CHUNK
        member = tl.load(members_ptr + slot * K + m // G, mask=m < K * G, other=-1).to(tl.int64)
        cached = length
        before = tl.zeros_like(length)
        offset = (prompt * HKV + head) * prompt_room * D
        keys_ptr, values_ptr = prompt_keys_ptr + offset, prompt_values_ptr + offset
    else:
        own_chunk, row = tile(part - prompt_parts, G, BLOCK_M)
        m += row
        first = own_chunk * CHUNK
        chunk = prompt_chunks + own_chunk
        member = tl.where(m < G, slot, -1)
        cached = step
        before = length
        offset = (slot * HKV + head) * response_room * D
        keys_ptr, values_ptr = own_keys_ptr + offset, own_values_ptr + offset
    # The new token is the last of its response, after those in the cache.
    newest = (not shared) & (first <= step) & (step < first + CHUNK)
    if ((first >= cached) & (not newest)) | (tl.max(member, axis=0) < 0):
        return
    live = member >= 0
    member = tl.where(live, member, 0)
    heads = head * G + m % G
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    rows = live[:, None] & inside[None, :]
    queries = (
        query_ptr
        + member[:, None] * query_slot_stride
        + heads[:, None] * query_head_stride
        + d[None, :]
    )
    q = tl.load(queries, mask=rows, other=0.0)

    running_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if newest:
        new_key, new_value = key_ptr + slot * key_slot_stride, value_ptr + slot * value_slot_stride
        key = store_token(new_key + head * key_head_stride, keys_ptr + step * D, d, inside)
        value = store_token(new_value + head * value_head_stride, values_ptr + step * D, d, inside)
        products = tl.sum(q.to(tl.float32) * key.to(tl.float32)[None, :], axis=1)
        running_max = scaled_logits(products, scale, softcap)
        total += 1.0
        result += value.to(tl.float32)[None, :]

    last = tl.minimum(first + CHUNK, cached)
    start = first
    least = None
    if window is not None:
        position = tl.load(prompt_lengths_ptr + member) + tl.load(steps_ptr + member)
        least = (position - window + 1 - before).to(tl.int32)
        # Blocks before every row's window are left out. Reading a block for other rows changes no
        # bit of a row.
        least_of_all = tl.min(tl.where(live, least, last), axis=0)
        start = tl.maximum(start, least_of_all // BLOCK_N * BLOCK_N)
    # In triton 3.6 the interpreter takes no loop bounds that are known only at run time.
    for block in range(0, CHUNK // BLOCK_N if INTERPRETED else tl.cdiv(last - start, BLOCK_N)):
        n = start + block * BLOCK_N + tl.arange(0, BLOCK_N)
        stored = (n < last)[:, None] & inside[None, :]
        k = tl.load(keys_ptr + n[:, None] * D + d[None, :], mask=stored, other=0.0)
        logits = scaled_logits(product(q, tl.trans(k)), scale, softcap)
        visible = (n < last)[None, :]
        if least is not None:
            visible = visible & (n[None, :] >= least[:, None])
        logits = tl.where(visible, logits, -float("inf"))
        running_max, base, decay = raised_max(running_max, tl.max(logits, axis=1))
        weights = tl.exp2(logits - base[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        v = tl.load(values_ptr + n[:, None] * D + d[None, :], mask=stored, other=0.0)
        result = result * decay[:, None] + product(weights.to(v.dtype), v)

    some = total > 0
    total = tl.where(some, total, 1.0)
    out = (member * HKV * G + heads) * chunks + chunk
    tl.store(lse_ptr + out, tl.where(some, running_max + tl.log2(total), -float("inf")), mask=live)
    tl.store(partials_ptr + out[:, None] * D + d[None, :], result / total[:, None], mask=rows)


@triton.jit(do_not_specialize=["prompts"])
def merge_kernel(
    partials_ptr,  # [R, H, CHUNKS, D] fp32
    lse_ptr,  # [R, H, CHUNKS] fp32
    prompt_ptr,  # [R] int64
    prompt_lengths_ptr,  # [R] int64
    steps_ptr,  # [R] int64
    out_ptr,  # [R, H, D], out; 0 in idle slots
    prompts,
    H: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    PROMPT_CHUNKS: tl.constexpr,  # the prompt's chunks come before the response's
    CHUNKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    row = slot * H + tl.program_id(1)
    busy = tl.load(prompt_ptr + slot) < prompts
    length = tl.load(prompt_lengths_ptr + slot)
    step = tl.load(steps_ptr + slot)
    d = tl.arange(0, BLOCK_D)
    running_max = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    result = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, CHUNKS, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        # An earlier step may have left results in the other chunks.
        written = tl.where(
            s < PROMPT_CHUNKS, s * CHUNK < length, (s - PROMPT_CHUNKS) * CHUNK <= step
        )
        lse = tl.load(
            lse_ptr + row * CHUNKS + s, mask=written & (s < CHUNKS) & busy, other=-float("inf")
        )
        running_max, base, decay = raised_max(running_max, tl.max(lse, axis=0))
        weights = tl.exp2(lse - base)
        total = total * decay + tl.sum(weights, axis=0)
        counted = (weights > 0.0)[:, None] & (d < D)[None, :]
        partials = tl.load(
            partials_ptr + (row * CHUNKS + s)[:, None] * D + d[None, :], mask=counted, other=0.0
        )
        result = result * decay + tl.sum(partials * weights[:, None], axis=0)
    out = result / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


def block_sizes(D: int, K: int, G: int, element_bytes: int) -> dict[str, int]:
    row_bytes = max(triton.next_power_of_2(D), 16) * element_bytes
    queries = min(max(triton.next_power_of_2(K * G), SMALLEST_TILE), LARGEST_TILE[element_bytes])
    keys_bytes = BLOCK_BYTES if queries * row_bytes <= BLOCK_BYTES else BLOCK_BYTES // 2
    return {
        "BLOCK_M": queries,
        "BLOCK_N": min(max(keys_bytes // row_bytes, 16), LARGEST_BLOCK[element_bytes]),
        "BLOCK_D": row_bytes // element_bytes,
    }


def warps(blocks: dict[str, int], element_bytes: int) -> int:
    """More where 128 threads would not have registers for sums or, in fp32, for the operands of
    products.
    """
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
    """As `attention.decode_attention`, for a contiguous cache."""
    R, H, D = query.shape
    P, Hkv, prompt_room, _ = cache.prompt_keys.shape
    response_room = cache.own_keys.shape[2]
    K, G = slots.responses_per_prompt, H // Hkv
    if not all(tensor.is_contiguous() for tensor in vars(cache).values()):
        raise ValueError("the cache's keys and values must be contiguous")
    query, key, value = (
        tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (query, key, value)
    )
    prompt_chunks, own_chunks = triton.cdiv(prompt_room, CHUNK), triton.cdiv(response_room, CHUNK)
    chunks = prompt_chunks + own_chunks
    partials = torch.empty(R, H, chunks, D, dtype=torch.float32, device=query.device)
    lse = torch.empty(R, H, chunks, dtype=torch.float32, device=query.device)
    out = torch.empty(R, H, D, dtype=query.dtype, device=query.device)
    blocks = block_sizes(D, K, G, query.element_size())
    programs = prompt_chunks * triton.cdiv(K * G, blocks["BLOCK_M"]) + own_chunks * triton.cdiv(
        G, blocks["BLOCK_M"]
    )
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
            prompt_room,
            response_room,
            prompt_chunks,
            chunks,
            scale,
            softcap,
            window,
            K=K,
            G=G,
            HKV=Hkv,
            D=D,
            CHUNK=CHUNK,
            **blocks,
            num_warps=warps(blocks, query.element_size()),
        )
        merge_kernel[(R, H)](
            partials,
            lse,
            slots.prompt,
            slots.prompt_lengths,
            slots.steps,
            out,
            P,
            H=H,
            D=D,
            CHUNK=CHUNK,
            PROMPT_CHUNKS=prompt_chunks,
            CHUNKS=chunks,
            BLOCK_D=triton.next_power_of_2(D),
            BLOCK_S=MERGE_BLOCK,
            num_warps=MERGE_WARPS,
        )
    return out
