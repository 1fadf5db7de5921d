"""Functions in one special-function instruction each, to an ulp or two of fp32. Tiny results are 0."""

import triton
import triton.language as tl

from fastp3o_kernels.operation import INTERPRET

INTERPRETED = tl.constexpr(INTERPRET)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exp2(x):
    """2^x; 0 where it is below 2^-126.

    tl.exp and tl.exp2 give those results too, for four more instructions an element. A probability loses nothing
    without them, nor does a sum with a term of 1.
    """
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x):
    """1 / x; 0 where it is below 2^-126."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
