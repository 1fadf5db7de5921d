"""Modeled times on an H100, of the head's plans, by the model that chooses them, and of a layer's
counted launches: no figure here was measured.
"""

import torch

from benchmarks.shapes import LARGE_HEADS, HeadSizes
from fastp3o_kernels.head.chunks import (
    MEMORY_BUDGET,
    MOST_BUDGET,
    WEIGHT_ROWS,
    HeadPlan,
    modeled_time,
    plan_chunks,
)
from fastp3o_kernels.head.head import Head, HeadDtypes

# Multiply-adds and bytes a second that an H100 reaches in products and in copies, and the least
# seconds of a launch.
PRODUCTS, BANDWIDTH, LAUNCH = 650e12 / 2, 3.0e12, 2e-6


def ragged(P: int, K: int, response: int) -> list[int]:
    """Bounds of P groups of K responses, each of half to one and a half times the mean length."""
    seeded = torch.Generator().manual_seed(0)
    lengths = torch.randint(response // 2, 3 * response // 2 + 1, (P, K), generator=seeded)
    return [0, *lengths.sum(1).cumsum(0).tolist()]


# The head's tokens of some rows: responses to (prompts, mean tokens). The first are those that the
# suite measures.
MEASURED = "32 pairs, exactly 128"
MODELLED = {
    MEASURED: list(range(0, 8193, 256)),
    "19 pairs (350, 40)": ragged(19, 2, 40),
    "21 pairs (128, 128)": ragged(21, 2, 128),
    "4 pairs (350, 850)": ragged(4, 2, 850),
    "2 × 16 (256)": ragged(2, 16, 256),
}


def plan(
    bounds: list[int], sizes: HeadSizes, budget: int, *, trained: bool = True, one_pass: bool = True
) -> HeadPlan:
    """Of a loss in bf16. trained: whether the head is. one_pass: without bias and entropy."""
    D, V = sizes
    half = torch.bfloat16
    dtypes = HeadDtypes(rounded=half, multiplied=half, dlogits=half, logits=torch.float32)
    head = Head(torch.empty(V, D, dtype=torch.bfloat16, device="meta", requires_grad=trained))
    return plan_chunks(
        bounds, V, dtypes, budget, triton=True, sum_bytes=dtypes.sum_bytes(head), one_pass=one_pass
    )


def modeled_ratio(plan: HeadPlan, head: HeadSizes) -> float:
    """Time of a plan on an H100, forward and backward in bf16, over that of three products of its
    tokens.
    """
    N, products = plan.chunks[-1].tokens.stop, modeled_time(plan)
    # Kernels over rows move 10 bytes a logit, in one pass 6, and products write it in 2 more than
    # bare ones, half of them hidden; reading the weight moves 2 an element.
    moved = 3.5 if plan.one_pass else 5.5
    return (products + moved * N * WEIGHT_ROWS / head.hidden) / (3 * N)


def modeled() -> list[list[str]]:
    """Predicted ratios with the least and the most memory budget. Header first."""
    lines = [["modeled, × bare products", "tokens", *(f"{D}, {V}" for D, V in LARGE_HEADS)]]
    for name, bounds in MODELLED.items():
        lines.append([name, str(bounds[-1]), *ratios(bounds, one_pass=True)])
    # As it was when a GPU was measured, but for the sum over fillings.
    before = [
        f"{MEASURED}, in two passes",
        str(MODELLED[MEASURED][-1]),
        *ratios(MODELLED[MEASURED], one_pass=False),
    ]
    lines.insert(2, before)
    return lines


def ratios(bounds: list[int], *, one_pass: bool) -> list[str]:
    budgets = MEMORY_BUDGET, MOST_BUDGET
    found = (
        [modeled_ratio(plan(bounds, head, budget, one_pass=one_pass), head) for budget in budgets]
        for head in LARGE_HEADS
    )
    return [f"{least:.2f} / {most:.2f}" for least, most in found]


def other_ms(layer: dict) -> float:
    """Of all launches of a layer's pass but its products. layer: an entry of layer_traffic.json."""
    return 1e3 * (layer["bytes"] / BANDWIDTH + LAUNCH * layer["launches"])


def product_ms(layer: dict) -> float:
    return 1e3 * max(layer["products"] / PRODUCTS, layer["product_bytes"] / BANDWIDTH)
