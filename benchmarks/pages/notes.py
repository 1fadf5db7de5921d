"""benchmarks/NOTES.md: what was measured on a GPU, and what ptxas made of the kernels."""

from math import ceil

from benchmarks.goals import GPU, ONE_B
from benchmarks.markdown import bullet
from benchmarks.pages.sources import FROZEN, HIDDEN, N, Records, results, ways
from benchmarks.records import NOT_MEASURED, Results, figure, select, spread
from benchmarks.shapes import LARGE_HEADS


def figures(records: Records) -> str:
    measured = results(records, GPU)
    head = select(measured, N=N, implementation="fastp3o", **HIDDEN)
    smaller = [r for r in select(head, dtype="bfloat16") if r["V"] < 256000]
    larger = [r for r in select(head, dtype="bfloat16") if r["V"] >= 256000]
    bf16 = select(measured, dtype="bfloat16", **HIDDEN)
    frozen = select(measured, N=N, implementation="fastp3o", **FROZEN)
    products = spread((r["operations"] / r["bare_ms"] / 1e9 for r in bf16), "{:.0f}")
    lines = [
        f"Bare products of the head ran at {products} TFLOP/s in bf16, and P3O's loss at "
        f"{figure(select(head, dtype='bfloat16'), 'tflop_per_s', '{:.0f}')}.",
        f"The loss from hidden states takes {figure(smaller, 'ratio_to_bare')} × three bare products in bf16 with V up "
        f"to 152,064, and {figure(larger, 'ratio_to_bare')} × with V from 256,000 on, where a budget of "
        "4 GB needs two fillings of the gradient.",
        f"A frozen head takes {figure(select(frozen, dtype='bfloat16'), 'ratio_to_bare')} × two products. The weight's "
        f"gradient costs what its product takes and {exposed(measured)} ms more, one head after the other: where there "
        "are two fillings, the traffic of their sum in fp32 and of its cast is exposed, not hidden.",
        *map(engine_note, ways(measured, "fastp3o engine", **ONE_B)),
        *(model_note(measured, kind) for kind in ("update", "log-probs")),
    ]
    return "\n".join(map(bullet, lines))


def engine_note(engine: dict) -> str:
    return (
        f"The engine samples 128 responses of 40 tokens from 1 B parameters in {engine['ms']:.0f} ms. Its floor is "
        f"{engine['floor_ms']:.0f} ms: {engine['floor_prefill_ms']:.0f} for the prompts, "
        f"{engine['floor_decode_ms']:.0f} for the tokens."
    )


def exposed(measured: Results) -> str:
    """Of each head the time that its weight's gradient adds, less that of its product: a third of
    three.
    """
    found = []
    for D, V in LARGE_HEADS:
        shape = {"N": N, "D": D, "V": V, "dtype": "bfloat16", "implementation": "fastp3o"}
        for full in select(measured, **HIDDEN, **shape):
            for frozen in select(measured, **FROZEN, **shape):
                found.append(full["ms"] - frozen["ms"] - full["bare_ms"] / 3)
    return "; ".join(f"{ms:.1f}" for ms in found) or NOT_MEASURED


def model_note(measured: Results, kind: str) -> str:
    found = [r for r in select(measured, level="model") if r["passes"].startswith(f"{kind}, ")]
    each = "; ".join(
        f"{r['passes'].removeprefix(f'{kind}, ')}: {r['ms']:.0f} ms, {r['ratio_to_bare']:.2f} ×"
        for r in found
    )
    return f"{kind.capitalize()} of 1 B, with the time over that of its own products: {each}."


def compiled(records: Records) -> str:
    kernels = records["compiled_kernels.json"]["kernels"]
    stacks = [kernel["stack"] for kernel in kernels if kernel["spills"]]
    return f"{len(stacks):,} of {len(kernels):,} spill" + (
        f", {spread(stacks, '{} bytes')}" if stacks else ""
    )


def registers(records: Records) -> str:
    """Of the log-probs' kernels on sm_90, and how many programs their registers leave room for."""
    kernels = select(
        records["compiled_kernels.json"]["kernels"], kernel="logprobs_kernel", architecture="sm_90"
    )
    programs = [
        min(65536 // (256 * kernel["warps"] * ceil(kernel["registers"] / 8)), 8)
        for kernel in kernels
    ]
    registers = spread((kernel["registers"] for kernel in kernels), "{}")
    return f"{registers} registers, so {spread(programs, '{}')} programs"
