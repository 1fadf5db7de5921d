"""benchmarks/README.md: what was measured on a GPU."""

from benchmarks.goals import GPU, ONE_B
from benchmarks.markdown import markdown
from benchmarks.pages.sources import FROZEN, HIDDEN, LOGITS, N, Records, results, ways
from benchmarks.records import GPU_RECORD, NOT_MEASURED, Results, figure, select, spread
from benchmarks.shapes import LARGE_HEADS


def head(records: Records) -> str:
    """P3O's loss from hidden states at each head."""
    measured = results(records, GPU)
    device, shapes = records[GPU_RECORD]["environment"]["device"], [f"D {D}, V {V:,}" for D, V in LARGE_HEADS]
    lines = [[f"{device}, {N:,} tokens: ms (× bare products; extra GB)", *shapes]]
    for what, wanted in {
        "P3O's loss, fp16, the default": HIDDEN | {"implementation": "fastp3o", "dtype": "float16"},
        "PyTorch, fp16": HIDDEN | {"implementation": "eager", "dtype": "float16"},
        "P3O's loss, bf16": HIDDEN | {"implementation": "fastp3o", "dtype": "bfloat16"},
        "PyTorch, bf16": HIDDEN | {"implementation": "eager", "dtype": "bfloat16"},
        "`linear_logprobs` and P3O's loss, bf16": HIDDEN
        | {"implementation": "fastp3o linear_logprobs", "dtype": "bfloat16"},
        "TRL's log-probs and P3O's loss, bf16": HIDDEN | {"implementation": "TRL", "dtype": "bfloat16"},
        "CCE and P3O's loss, bf16": HIDDEN | {"implementation": "CCE", "dtype": "bfloat16"},
        "frozen head, fp16, × two products": FROZEN | {"implementation": "fastp3o", "dtype": "float16"},
        "frozen head, bf16, × two products": FROZEN | {"implementation": "fastp3o", "dtype": "bfloat16"},
    }.items():
        at_heads = [select(measured, N=N, D=D, V=V, **wanted) for D, V in LARGE_HEADS]
        lines.append([what, *map(time_ratio_and_memory, at_heads)])
    return markdown(lines)


def time_ratio_and_memory(found: Results) -> str:
    if not found:
        return NOT_MEASURED
    (result,) = found
    return f"{result['ms']:.1f} ({result['ratio_to_bare']:.2f}; {result['extra_gb']:.1f})"


def others(records: Records) -> str:
    """What else was measured on a GPU."""
    measured = results(records, GPU)
    model, objectives = select(measured, level="model"), select(measured, level="objectives")
    ratio = "ratio_to_bare"
    lines = [[records[GPU_RECORD]["environment"]["device"], "fastp3o", "others"]]
    lines.append(
        [
            "the loss from logits, time × a copy",
            figure(measured, ratio, **LOGITS, implementation="fastp3o"),
            f"with TRL's log-probs {figure(measured, ratio, **LOGITS, implementation='TRL')}, "
            f"PyTorch {figure(measured, ratio, **LOGITS, implementation='eager')}",
        ]
    )
    names = {result["objective"] for result in select(objectives, implementation="fastp3o")}
    lines.append(
        [
            f"losses of {len(names)} objectives, first head, bf16, time × bare products",
            figure(objectives, ratio, implementation="fastp3o"),
            "",
        ]
    )
    for kind in ("update", "log-probs"):
        found = [result for result in model if result["passes"].startswith(kind)]
        lines.append([f"{kind} of 1 B, all lengths, time × its products", figure(found, ratio), ""])
    lines.append(["update of 1 B, × plain packing", packing_speed(measured, "shared prompts", 350, 2), ""])
    engines = ways(measured, "fastp3o engine", **ONE_B)
    shares = spread((way["floor_ms"] / way["ms"] for way in engines), "{:.0%}")
    sampled = f"{spread(way['ratio'] for way in engines)}, {shares} of the floor"
    lines.append(["rollouts of 1 B, 64 prompts of 350, 2 × 40 tokens, tokens a second × `generate`", sampled, ""])
    return markdown(lines)


def packing_speed(measured: Results, layout: str, prompt: int, K: int) -> str:
    updates = select(measured, level="training", implementation=layout, prompt=prompt, K=K)
    return spread(1 / result["ratio_to_bare"] for result in updates)
