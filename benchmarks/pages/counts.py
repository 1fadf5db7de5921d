"""benchmarks/README.md: what is modelled beside what was measured, what was counted, servers and turns."""

from benchmarks.environment import described
from benchmarks.goals import GPU
from benchmarks.markdown import markdown
from benchmarks.modelled import MEASURED, modelled
from benchmarks.pages.sources import HIDDEN, N, Records, Section, results
from benchmarks.records import figure, select, spread
from benchmarks.shapes import LARGE_HEADS


def modelled_table(records: Records) -> str:
    """The model, and what was measured of its first row."""
    header, first, before, *rest = modelled()
    found = select(results(records, GPU), **HIDDEN, N=N, implementation="fastp3o", dtype="bfloat16")
    measured = [figure(found, "ratio_to_bare", D=D, V=V) for D, V in LARGE_HEADS]
    assert first[0] == MEASURED
    return markdown([header, first, before, ["*measured* on the GPU, with 4 GB", first[1], *measured], *rest])


def launches(phase: str) -> Section:
    """Of an update or its log-probs, over the precisions."""

    def section(records: Records) -> str:
        counts = records["update_counts.json"]
        every = (counts[precision]["launches"][phase] for precision in ("fp32", "bf16", "bf16-autocast", "fp16"))
        return spread(every, "{:,}")

    return section


def served(records: Records) -> str:
    rates = records["served.json"]["speed"]["tokens_per_second"]
    named = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
    return f"{named} ({described(records['served.json'].get('environment'))})."


def turns(records: Records) -> str:
    lines = [["prompt, turns × tokens, observation", "rounds, ms a token of the policy", "kept", "gain"]]
    for one in records["turns.json"]["benchmarks"]:
        shape = f"{one['prompt']}, {one['turns']} × {one['turn']}, {one['observation']}"
        lines.append([shape, f"{one['rounds']:.2f}", f"{one['kept']:.2f}", f"{one['gain']:.1f}"])
    return markdown(lines)


def turns_machine(records: Records) -> str:
    return described(records["turns.json"].get("environment"))
