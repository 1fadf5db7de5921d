"""benchmarks/README.md: what was measured on a GPU."""

from benchmarks.goals import GPU, ONE_B
from benchmarks.markdown import markdown
from benchmarks.pages.sources import FROZEN, HIDDEN, LOGITS, N, Records, results, ways
from benchmarks.records import GPU_RECORD, NOT_MEASURED, Results, figure, select, spread
from benchmarks.results_file import OUT_OF_TIME
from benchmarks.shapes import LARGE_HEADS


def head(records: Records) -> str:
    """P3O's loss from hidden states at each head."""
    measured = results(records, GPU)
    device = records[GPU_RECORD]["environment"]["device"]
    shapes = [f"D {D}, V {V:,}" for D, V in LARGE_HEADS]
    lines = [[f"{device}, {N:,} tokens: ms (× bare products; extra GB)", *shapes]]
    for what, implementation, dtype in [
        ("P3O's loss, fp16, the default", "fastp3o", "float16"),
        ("PyTorch, fp16", "eager", "float16"),
        ("P3O's loss, bf16", "fastp3o", "bfloat16"),
        ("PyTorch, bf16", "eager", "bfloat16"),
        ("torch.compile, bf16", "torch.compile", "bfloat16"),
        ("`linear_logprobs` and P3O's loss, bf16", "fastp3o linear_logprobs", "bfloat16"),
        ("TRL's log-probs and P3O's loss, bf16", "TRL", "bfloat16"),
        ("CCE and P3O's loss, bf16", "CCE", "bfloat16"),
        ("Liger's scaled cross-entropy and P3O's loss, bf16", "Liger scaled", "bfloat16"),
        (
            "torch's `linear_cross_entropy` and P3O's loss, bf16",
            "torch linear_cross_entropy",
            "bfloat16",
        ),
        ("mean cross-entropy alone, QuACK's, bf16", "QuACK cross-entropy", "bfloat16"),
        ("mean cross-entropy alone, Liger's, bf16", "Liger cross-entropy", "bfloat16"),
    ]:
        rows = select(measured, N=N, implementation=implementation, dtype=dtype, **HIDDEN)
        cells = [time_ratio_and_memory(select(rows, D=D, V=V)) for D, V in LARGE_HEADS]
        if not rows:
            cells[0] += why_absent(records[GPU_RECORD], implementation)
        lines.append([what, *cells])
    for what, dtype in (
        ("frozen head, fp16, × two products", "float16"),
        ("frozen head, bf16, × two products", "bfloat16"),
    ):
        rows = select(measured, N=N, implementation="fastp3o", dtype=dtype, **FROZEN)
        lines.append(
            [what, *(time_ratio_and_memory(select(rows, D=D, V=V)) for D, V in LARGE_HEADS)]
        )
    return markdown(lines)


def why_absent(record: dict, implementation: str) -> str:
    """What stopped an implementation of the head on that machine, if it was tried."""
    tried = [entry for entry in record["not_measured"] if f"-{implementation}" in entry["name"]]
    reasons = [entry["reason"] for entry in tried if not entry["reason"].startswith(OUT_OF_TIME)]
    return f": {reasons[0].removeprefix('absent: ').replace('|', '/')}" if reasons else ""


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
    for kind in ("update", "log-probs"):
        lines.append(
            [
                f"{kind} of 1 B, (350, 40), time × its products, by layers",
                *layer_ratios(measured, kind),
            ]
        )
    lines.append(["launches of an update of 1 B", *launches(measured)])
    lines.append(
        [
            "run of 1 B: reward of the first and last update; GB at most, predicted",
            run_figures(measured),
            "",
        ]
    )
    lines.append(["iteration of 1 B, time × fastp3o's", *iteration_ratios(measured)])
    lines.append(
        ["update of 1 B, × plain packing", packing_speed(measured, "shared prompts", 350, 2), ""]
    )
    engines = ways(measured, "fastp3o engine", **ONE_B)
    shares = spread((way["floor_ms"] / way["ms"] for way in engines), "{:.0%}")
    sampled = f"{spread(way['ratio'] for way in engines)}, {shares} of the floor"
    lines.append(
        [
            "rollouts of 1 B, 64 prompts of 350, 2 × 40 tokens, tokens a second × `generate`",
            sampled,
            "",
        ]
    )
    return markdown(lines)


def packing_speed(measured: Results, layout: str, prompt: int, K: int) -> str:
    updates = select(measured, level="training", implementation=layout, prompt=prompt, K=K)
    return spread(1 / result["ratio_to_bare"] for result in updates)


def layer_ratios(measured: Results, kind: str) -> tuple[str, str]:
    """As in runs, and in the other ways."""
    name = f"{kind}, prompts of 350, 2 responses of 40"
    ours = figure(measured, "ratio_to_bare", level="model", passes=name)
    plain, compiled = (
        figure(
            measured,
            "ratio_to_bare",
            level="layers",
            passes=name,
            implementation=f"fastp3o {way} layers",
        )
        for way in ("plain", "compiled")
    )
    return ours, f"plain {plain}, compiled {compiled}"


def launches(measured: Results) -> tuple[str, str]:
    ours, plain = (
        figure(measured, "launches", "{:,.0f}", level="kernels", implementation=layers)
        for layers in ("fastp3o", "fastp3o plain layers")
    )
    return ours, f"plain layers {plain}"


def run_figures(measured: Results) -> str:
    runs = select(measured, level="training run")
    texts = [
        f"{run['rewards'][0]:.2f} to {run['rewards'][-1]:.2f}; {run['peak_gb']:.1f}, {run['predicted_gb']:.1f}"
        for run in runs
    ]
    return "; ".join(texts) or NOT_MEASURED


def iteration_ratios(measured: Results) -> tuple[str, str]:
    trainers = [each["trainers"] for each in select(measured, level="iteration")]
    ours = spread(
        (each["fastp3o"]["seconds"] for each in trainers if "fastp3o" in each), "1: {:.2f} s"
    )
    grpo, dpo = (
        spread(each.get(f"TRL {name}", {}).get("ratio") for each in trainers)
        for name in ("GRPO", "online DPO")
    )
    return ours, f"TRL's GRPO {grpo}, online DPO {dpo}"
