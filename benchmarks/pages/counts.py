"""benchmarks/README.md: what is modeled beside what was measured, what was counted, servers and
turns.
"""

from benchmarks.environment import described
from benchmarks.goals import GPU
from benchmarks.markdown import markdown
from benchmarks.modeled import MEASURED, modeled, other_ms, product_ms
from benchmarks.pages.sources import HIDDEN, N, Records, Section, results
from benchmarks.records import figure, select, spread
from benchmarks.shapes import LARGE_HEADS

STEP = "decode step"


def modeled_table(records: Records) -> str:
    """The model, and what was measured of its first row."""
    header, first, before, *rest = modeled()
    found = select(results(records, GPU), **HIDDEN, N=N, implementation="fastp3o", dtype="bfloat16")
    measured = [figure(found, "ratio_to_bare", D=D, V=V) for D, V in LARGE_HEADS]
    assert first[0] == MEASURED
    return markdown(
        [header, first, before, ["*measured* on the GPU, with 4 GB", first[1], *measured], *rest]
    )


def launches(phase: str) -> Section:
    """Of an update or its log-probs, over the precisions."""

    def section(records: Records) -> str:
        counts = records["update_counts.json"]
        every = (
            counts[precision]["launches"][phase]
            for precision in ("fp32", "bf16", "bf16-autocast", "fp16")
        )
        return spread(every, "{:,}")

    return section


def layers(records: Records) -> str:
    """A layer as transformers has it → fused."""
    counted = records["layer_traffic.json"]["layers"]
    lines = [
        [
            "a layer, besides attention",
            "launches",
            "GB moved",
            "ms of these",
            "ms of products",
            "GB kept",
        ]
    ]
    for old in (layer for layer in counted if not layer["fused"]):
        same = {key: old[key] for key in ("model", "precision", "pass")}
        (new,) = select(counted, **same, fused=True)
        lines.append(
            [
                ", ".join(same.values()),
                *(f"{form(old)} → {form(new)}" for form in (launches_of, moved, modeled_ms)),
                f"{product_ms(new):.2f}",
                f"{old['kept'] / 1e9:.2f} → {new['kept'] / 1e9:.2f}" if new["kept"] else "",
            ]
        )
    return markdown(lines)


def fused(records: Records) -> str:
    """Forward and backward of a layer, in half precision."""
    counted = records["layer_traffic.json"]["layers"]
    sentences = []
    for model in dict.fromkeys(layer["model"] for layer in counted):
        passes = [
            one
            for one in select(counted, model=model, precision="fp16", fused=True)
            if one["pass"] != STEP
        ]
        launches, moved = (sum(one[key] for one in passes) for key in ("launches", "bytes"))
        sentences.append(f"{launches} launches and {moved / 1e9:.1f} GB at {model}")
    return " and ".join(sentences)


def launches_of(layer: dict) -> str:
    return str(layer["launches"])


def moved(layer: dict) -> str:
    """Without what products move."""
    return f"{layer['bytes'] / 1e9:.3f}"


def modeled_ms(layer: dict) -> str:
    return f"{other_ms(layer):.2f}"


def served(records: Records) -> str:
    rates = records["served.json"]["speed"]["tokens_per_second"]
    named = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
    return f"{named} ({described(records['served.json'].get('environment'))})."


def turns(records: Records) -> str:
    lines = [
        ["prompt, turns × tokens, observation", "rounds, ms a token of the policy", "kept", "gain"]
    ]
    for one in records["turns.json"]["benchmarks"]:
        shape = f"{one['prompt']}, {one['turns']} × {one['turn']}, {one['observation']}"
        lines.append([shape, f"{one['rounds']:.2f}", f"{one['kept']:.2f}", f"{one['gain']:.1f}"])
    return markdown(lines)


def turns_machine(records: Records) -> str:
    return described(records["turns.json"].get("environment"))
