"""Logits -> the log-probability of each label, statistics of each row, and the gradient of the
logits.

N rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastp3o_kernels.operation import INTERPRET
from fastp3o_kernels.rows.rows import ALIGNMENT, Rows

# One program reads one row: V is hundreds of kilobytes in practice, enough to stream, and rows are
# enough programs. 4096 bf16 elements are 32 bytes for each of 256 threads: two 16-byte loads in
# flight per step of the loop.
BLOCK_V = 4096
WARPS = 8
# A tile of rows and columns of the sum over rows, two 16-byte loads of fp32 for each of 128
# threads.
BIAS_BLOCK_R, BIAS_BLOCK_C, BIAS_WARPS = 4, 256, 4
# A thread's 16-byte load: the largest logit so far is kept for each of these groups, so that the
# loop over the vocabulary needs no exchange between threads.
LOAD_BYTES = 16
# Where a maximum begins, in fp32: -inf minus it is -inf, and not NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)
# Base-2 log-probability below which a probability is 0; a product with it is 0, too, and not NaN.
LEAST_LOG2 = tl.constexpr(-256.0)
# Pointers to one number a row. Slices begin at any address, and Triton would compile a variant for
# each alignment.
ROW_NUMBERS = ["labels_ptr", "logprobs_ptr", "max_ptr", "log_sum_ptr", "mean_ptr", "is_top_ptr"]
ROW_NUMBERS += ["coefficients_ptr", "entropy_ptr", "entropy_coefficients_ptr"]
INTERPRETED = tl.constexpr(INTERPRET)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# The next two take one special-function instruction each and are right to an ulp or two of fp32.
# Tiny results are 0.


@triton.jit
def exp2(x):
    """2^x; 0 where it is below 2^-126.

    tl.exp and tl.exp2 give those results too, for four more instructions an element. A probability
    loses nothing without them, nor does a sum with a term of 1.
    """
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal(x):
    """1 / x; 0 where it is below 2^-126."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def tanh_and_slope(z):
    """tanh z, to an ulp or two of fp32, and 1 - tanh² z, also where tanh is rounded to 1."""
    size = tl.abs(z)
    # exp overflows to infinity where tanh is 1.
    r = reciprocal(exp2(size * (2.0 * LOG2E)) + 1.0)
    far = tl.where(z < 0.0, 2.0 * r - 1.0, 1.0 - 2.0 * r)
    # Near 0, 1 - 2 r would lose digits. Cephes' polynomial of tanhf serves up to 0.625.
    s = z * z
    series = (
        ((-5.70498872745e-3 * s + 2.06390887954e-2) * s - 5.37397155531e-2) * s + 1.33314422036e-1
    ) * s
    near = z + z * s * (series - 3.33332819422e-1)
    return tl.where(size < 0.625, near, far), 4.0 * r * (1.0 - r)


@triton.jit
def load_logits(logits_ptr, bias_ptr, columns, inside, softcap):
    """Logits before the temperature, -inf outside the vocabulary, and their slope under the soft
    cap.
    """
    x = tl.load(logits_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    slope = 1.0
    if softcap is not None:
        tanh, slope = tanh_and_slope(x * (1.0 / softcap))
        x = tl.where(inside, softcap * tanh, -float("inf"))
    return x, slope


@triton.jit
def grouped_columns(BLOCK_V: tl.constexpr, GROUP: tl.constexpr):
    """The columns of a block, [groups, GROUP]: each group is one load of a thread."""
    return tl.arange(0, BLOCK_V // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def max_and_sum(
    logits_ptr,
    bias_ptr,
    softcap,
    to_base_2,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The largest logit of a row, and the sum of 2^((logit - max) to_base_2)."""
    columns = grouped_columns(BLOCK_V, GROUP)
    running_max = tl.full([BLOCK_V // GROUP], LOWEST, dtype=tl.float32)
    sums = tl.zeros([BLOCK_V // GROUP], dtype=tl.float32)
    # Whole blocks have no mask: one that cuts a row at an odd place splits its accesses into single
    # elements.
    WHOLE: tl.constexpr = V // BLOCK_V * BLOCK_V
    for rest in tl.static_range(2):
        for start in range(rest * WHOLE, V if rest else WHOLE, BLOCK_V):
            inside = (start + columns < V) | (rest == 0)
            x, _ = load_logits(logits_ptr, bias_ptr, start + columns, inside, softcap)
            new_max = tl.maximum(running_max, tl.max(x, axis=1))
            decay = exp2((running_max - new_max) * to_base_2)
            sums = sums * decay + tl.sum(exp2((x - new_max[:, None]) * to_base_2), axis=1)
            running_max = new_max
    row_max = tl.max(running_max, axis=0)
    return row_max, tl.sum(sums * exp2((running_max - row_max) * to_base_2), axis=0)


@triton.jit(do_not_specialize=["ignore_index"], do_not_specialize_on_alignment=ROW_NUMBERS)
def logprobs_kernel(
    logits_ptr,  # [N, V], rows at any stride
    labels_ptr,  # [N]
    bias_ptr,  # [V], or None
    logprobs_ptr,  # [N] fp32, out
    max_ptr,  # [N] fp32, out: largest logit of the row, before the temperature
    log_sum_ptr,  # [N] fp32, out: log of the sum of exp((logit - max) / temperature)
    row_stride,
    inverse_temperature,
    softcap,  # None: logits are not capped
    ignore_index,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GROUP: tl.constexpr,
):
    # N programs in the grid's first dimension: only that one may exceed 65535. Offsets pass 2^31.
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    to_base_2 = inverse_temperature * LOG2E
    row_max, row_sum = max_and_sum(logits_ptr, bias_ptr, softcap, to_base_2, V, BLOCK_V, GROUP)
    log_sum = tl.log(row_sum)
    label = tl.load(labels_ptr + row)
    # A label outside the vocabulary gives NaN, not a value from somewhere else in memory.
    within_vocabulary = (label >= 0) & (label < V)
    label_logit, _ = load_logits(logits_ptr, bias_ptr, label, within_vocabulary, softcap)
    # Largest first: both terms are at most 0 in any rounding, so the log-probability never exceeds
    # 0.
    logprob = (label_logit - row_max) * inverse_temperature - log_sum
    logprob = tl.where(within_vocabulary, logprob, float("nan"))
    tl.store(logprobs_ptr + row, tl.where(label == ignore_index, 0.0, logprob))
    tl.store(max_ptr + row, row_max)
    tl.store(log_sum_ptr + row, log_sum)


@triton.jit
def log2_probability(x, row_max, log_sum, inverse_temperature):
    return (x - row_max) * (inverse_temperature * LOG2E) - log_sum * LOG2E


@triton.jit
def at_least(x, lowest):
    return tl.maximum(x, lowest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["ignore_index"], do_not_specialize_on_alignment=ROW_NUMBERS)
def statistics_kernel(
    logits_ptr,  # [N, V], rows at any stride
    labels_ptr,  # [N]
    bias_ptr,  # [V], or None
    max_ptr,  # [N] fp32
    log_sum_ptr,  # [N] fp32
    entropy_ptr,  # [N] fp32, out
    mean_ptr,  # [N] fp32, out
    is_top_ptr,  # [N] bool, out
    row_stride,
    inverse_temperature,
    softcap,  # None: logits are not capped
    ignore_index,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    label = tl.load(labels_ptr + row)
    row_max = tl.load(max_ptr + row)
    log_sum = tl.load(log_sum_ptr + row)
    columns = grouped_columns(BLOCK_V, GROUP)
    # Each thread sums its own columns; one exchange at the end.
    entropies = tl.zeros([BLOCK_V // GROUP], dtype=tl.float32)
    totals = tl.zeros([BLOCK_V // GROUP], dtype=tl.float32)
    WHOLE: tl.constexpr = V // BLOCK_V * BLOCK_V
    for rest in tl.static_range(2):
        for start in range(rest * WHOLE, V if rest else WHOLE, BLOCK_V):
            inside = (start + columns < V) | (rest == 0)
            x, _ = load_logits(logits_ptr, bias_ptr, start + columns, inside, softcap)
            log2 = at_least(log2_probability(x, row_max, log_sum, inverse_temperature), LEAST_LOG2)
            entropies += tl.sum(exp2(log2) * log2, axis=1)
            totals += tl.sum(tl.where(inside, x, 0.0), axis=1)
    within_vocabulary = (label >= 0) & (label < V)
    label_logit, _ = load_logits(logits_ptr, bias_ptr, label, within_vocabulary, softcap)
    counts = label != ignore_index
    tl.store(entropy_ptr + row, tl.where(counts, -LN2 * tl.sum(entropies, axis=0), 0.0))
    tl.store(
        mean_ptr + row, tl.where(counts, tl.sum(totals, axis=0) * inverse_temperature / V, 0.0)
    )
    tl.store(is_top_ptr + row, counts & (label_logit >= row_max))


@triton.jit
def logit_gradient(x, slope, row_numbers, entropy, entropy_gradient, IS_LABEL: tl.constexpr):
    """dL/d(logit): of the label's alone, or as if no logit of x were the label's. Gradients of the
    row's log-prob and entropy are divided by the temperature.
    """
    row_max, log_sum, inverse_temperature, gradient = row_numbers
    log2 = log2_probability(x, row_max, log_sum, inverse_temperature)
    p = exp2(log2)
    dlogits = gradient * (1.0 - p) if IS_LABEL else gradient * -p
    if entropy_gradient is not None:
        dlogits -= entropy_gradient * p * (at_least(log2, LEAST_LOG2) * LN2 + entropy)
    return dlogits * slope


@triton.jit(do_not_specialize=["ignore_index"], do_not_specialize_on_alignment=ROW_NUMBERS)
def dlogits_kernel(
    logits_ptr,  # [N, V], rows at any stride
    labels_ptr,  # [N]
    bias_ptr,  # [V], or None
    max_ptr,  # [N] fp32
    log_sum_ptr,  # [N] fp32
    coefficients_ptr,  # [N] fp32, dL/d(log-prob of the row)
    entropy_ptr,  # [N] fp32, or None
    entropy_coefficients_ptr,  # [N] fp32, dL/d(entropy of the row); None: it has no gradient
    dlogits_ptr,  # [N, V], out; may be logits_ptr
    row_stride,
    dlogits_row_stride,
    inverse_temperature,
    softcap,  # None: logits are not capped
    ignore_index,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    dlogits_ptr += row * dlogits_row_stride
    label = tl.load(labels_ptr + row)
    gradient = tl.load(coefficients_ptr + row) * inverse_temperature
    nothing = gradient == 0.0
    entropy_gradient = None
    if entropy_coefficients_ptr is not None:
        entropy_gradient = tl.load(entropy_coefficients_ptr + row) * inverse_temperature
        nothing = nothing & (entropy_gradient == 0.0)
    WHOLE: tl.constexpr = V // BLOCK_V * BLOCK_V
    if nothing | (label == ignore_index):
        # The row's logits are not read.
        for rest in tl.static_range(2):
            for start in range(rest * WHOLE, V if rest else WHOLE, BLOCK_V):
                columns = start + tl.arange(0, BLOCK_V)
                zeros = tl.zeros([BLOCK_V], dtype=dlogits_ptr.dtype.element_ty)
                tl.store(dlogits_ptr + columns, zeros, mask=(columns < V) | (rest == 0))
    else:
        row_max = tl.load(max_ptr + row)
        log_sum = tl.load(log_sum_ptr + row)
        entropy = None
        if entropy_coefficients_ptr is not None:
            entropy = tl.load(entropy_ptr + row)
        within_vocabulary = (label >= 0) & (label < V)
        # The label's entry is stored last, by itself: a comparison of every column with the label
        # would cost a sixth of all instructions. It is rounded once, from fp32: adding to a stored
        # value loses it where p is near 1.
        row_numbers = row_max, log_sum, inverse_temperature, gradient
        label_logit, label_slope = load_logits(
            logits_ptr, bias_ptr, label, within_vocabulary, softcap
        )
        label_entry = logit_gradient(
            label_logit, label_slope, row_numbers, entropy, entropy_gradient, True
        )
        # Some thread may overwrite the label's logit, or store its entry, before another one has
        # come here.
        tl.debug_barrier()
        for rest in tl.static_range(2):
            for start in range(rest * WHOLE, V if rest else WHOLE, BLOCK_V):
                columns = start + tl.arange(0, BLOCK_V)
                inside = (columns < V) | (rest == 0)
                x, slope = load_logits(logits_ptr, bias_ptr, columns, inside, softcap)
                dlogits = logit_gradient(x, slope, row_numbers, entropy, entropy_gradient, False)
                tl.store(
                    dlogits_ptr + columns, dlogits.to(dlogits_ptr.dtype.element_ty), mask=inside
                )
        tl.debug_barrier()
        tl.store(
            dlogits_ptr + label,
            label_entry.to(dlogits_ptr.dtype.element_ty),
            mask=within_vocabulary,
        )


@triton.jit(do_not_specialize=["N", "ignore_index"], do_not_specialize_on_alignment=ROW_NUMBERS)
def bias_gradient_kernel(
    logits_ptr,  # [N, V], rows at any stride
    labels_ptr,  # [N]
    bias_ptr,  # [V]
    max_ptr,  # [N] fp32
    log_sum_ptr,  # [N] fp32
    coefficients_ptr,  # [N] fp32, dL/d(log-prob of the row)
    entropy_ptr,  # [N] fp32, or None
    entropy_coefficients_ptr,  # [N] fp32, dL/d(entropy of the row); None: it has no gradient
    dbias_ptr,  # [V] fp32, in and out: the gradients of all rows' logits are added
    N,
    row_stride,
    inverse_temperature,
    softcap,  # None: logits are not capped
    ignore_index,
    V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # A program has a block of columns, and adds their rows in order.
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    sums = tl.zeros([BLOCK_C], dtype=tl.float32)
    start = N * 0
    while start < N:
        row = start + tl.arange(0, BLOCK_R)
        label = tl.load(labels_ptr + row, mask=row < N, other=0)
        gradient = tl.load(coefficients_ptr + row, mask=row < N, other=0.0) * inverse_temperature
        nothing = gradient == 0.0
        entropy = None
        entropy_gradient = None
        if entropy_coefficients_ptr is not None:
            entropy = tl.load(entropy_ptr + row, mask=row < N, other=0.0)[:, None]
            entropy_gradient = (
                tl.load(entropy_coefficients_ptr + row, mask=row < N, other=0.0)
                * inverse_temperature
            )
            nothing = nothing & (entropy_gradient == 0.0)
            entropy_gradient = entropy_gradient[:, None]
        nothing = nothing | (label == ignore_index)
        row_max = tl.load(max_ptr + row, mask=row < N, other=0.0)[:, None]
        log_sum = tl.load(log_sum_ptr + row, mask=row < N, other=0.0)[:, None]
        # Rows without a gradient are not read.
        inside = (columns < V)[None, :] & (~nothing)[:, None]
        places = row.to(tl.int64)[:, None] * row_stride + columns[None, :]
        x = tl.load(logits_ptr + places, mask=inside, other=0.0).to(tl.float32)
        x += tl.load(bias_ptr + columns, mask=columns < V, other=0.0).to(tl.float32)[None, :]
        slope = 1.0
        if softcap is not None:
            tanh, slope = tanh_and_slope(x * (1.0 / softcap))
            x = softcap * tanh
        row_numbers = row_max, log_sum, inverse_temperature, gradient[:, None]
        dlogits = logit_gradient(x, slope, row_numbers, entropy, entropy_gradient, False)
        dlogits += tl.where(columns[None, :] == label[:, None], gradient[:, None] * slope, 0.0)
        sums += tl.sum(tl.where(inside, dlogits, 0.0), axis=0)
        start += BLOCK_R
    dbias = tl.load(dbias_ptr + columns, mask=columns < V, other=0.0)
    tl.store(dbias_ptr + columns, dbias + sums, mask=columns < V)


def block_size(V: int) -> int:
    """A power of two, no longer than the vocabulary needs."""
    return min(BLOCK_V, max(triton.next_power_of_2(V), LOAD_BYTES))


def group_size(logits: Tensor) -> int:
    """Elements of a thread's load: of 16 bytes, or 1 where rows begin anywhere and neighbours go to
    other threads.
    """
    aligned = logits.data_ptr() % LOAD_BYTES == 0 and logits.stride(0) % ALIGNMENT == 0
    return LOAD_BYTES // logits.element_size() if aligned else 1


def row_arguments(rows: Rows) -> dict[str, Tensor | float | None]:
    """Rows as the kernels take them."""
    transform, V = rows.transform, rows.logits.shape[1]
    return {
        "logits_ptr": rows.logits,
        "labels_ptr": rows.labels,
        "row_stride": rows.logits.stride(0),
        "ignore_index": rows.ignore_index,
        # The kernels step by one element, whatever the caller's strides.
        "bias_ptr": None if transform.bias is None else transform.bias.contiguous(),
        "softcap": transform.softcap,
        "inverse_temperature": 1 / transform.temperature,
        "V": V,
        "BLOCK_V": block_size(V),
        "num_warps": WARPS,
    }


def launch_logprobs(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, row maxima and log-sums, [N] fp32 each; one launch."""
    logits = rows.logits
    # Each a tensor of its own: autograd lets nobody change a view of several that come together.
    logprobs, row_max, log_sum = (
        torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(3)
    )
    with torch.cuda.device_of(logits):
        logprobs_kernel[(len(logits),)](
            **row_arguments(rows),
            logprobs_ptr=logprobs,
            max_ptr=row_max,
            log_sum_ptr=log_sum,
            GROUP=group_size(logits),
        )
    return logprobs, row_max, log_sum


def launch_statistics(
    rows: Rows, row_max: Tensor, log_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Entropies and mean logits [N] fp32, and is_top [N] bool; one launch."""
    entropy, mean_logit = torch.empty_like(row_max), torch.empty_like(row_max)
    is_top = torch.empty_like(row_max, dtype=torch.bool)
    with torch.cuda.device_of(row_max):
        statistics_kernel[(len(row_max),)](
            **row_arguments(rows),
            max_ptr=row_max,
            log_sum_ptr=log_sum,
            entropy_ptr=entropy,
            mean_ptr=mean_logit,
            is_top_ptr=is_top,
            GROUP=group_size(rows.logits),
        )
    return entropy, mean_logit, is_top


def launch_dlogits(
    rows: Rows,
    row_max: Tensor,
    log_sum: Tensor,
    coefficients: Tensor,
    out: Tensor,
    entropy: Tensor | None,
    entropy_coefficients: Tensor | None,
    dbias: Tensor | None = None,
) -> None:
    """out [N, V] = the gradient of the logits; it may be the logits unless there is dbias. One
    launch, and one for it.

    coefficients: [N] fp32, dL/d(log-prob). entropy_coefficients: dL/d(entropy), which needs the
    entropies; None: 0. dbias: [V] fp32, which the sum of these gradients is added to, before any
    rounding; None: nothing is. It reads the logits once more, which heads with a bias that is
    trained are rare enough for.
    """
    given = {
        "max_ptr": row_max,
        "log_sum_ptr": log_sum,
        "coefficients_ptr": coefficients,
        "entropy_ptr": None if entropy_coefficients is None else entropy,
        "entropy_coefficients_ptr": entropy_coefficients,
    }
    with torch.cuda.device_of(out):
        arguments = row_arguments(rows) | given
        dlogits_kernel[(len(out),)](**arguments, dlogits_ptr=out, dlogits_row_stride=out.stride(0))
        if dbias is not None:
            V = arguments["V"]
            arguments |= {"BLOCK_R": BIAS_BLOCK_R, "BLOCK_C": BIAS_BLOCK_C, "num_warps": BIAS_WARPS}
            del arguments["BLOCK_V"]
            bias_gradient_kernel[(triton.cdiv(V, BIAS_BLOCK_C),)](
                **arguments, dbias_ptr=dbias, N=len(out)
            )
