"""Results of the suite -> tables. Every number comes from a JSON; one that it lacks is written "not measured".

python -m benchmarks.report                        # every table and the goals, of the committed results
python -m benchmarks.report RESULTS.json           # the tables of one run
python -m benchmarks.report --write                # what pages say of GPUs
"""

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks.goals import GOALS, NOT_MEASURED, Results, select
from benchmarks.predicted_iteration import predicted_iterations
from benchmarks.results_file import joined
from benchmarks.shapes import LARGE_HEADS, HeadSizes
from fastp3o_kernels.head.chunks import MEMORY_BUDGET, MOST_BUDGET, WEIGHT_ROWS, modelled_time, plan_chunks
from fastp3o_kernels.head.head import HeadDtypes

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
README = FOLDER / "README.md"
FRONT_PAGE = FOLDER.parent / "README.md"
BOTH = "forward and backward"
# Of an iteration, in their order; an update is four epochs.
PHASES = ("rollout", "reward", "logprobs", "update", "other")
WAYS = ("fastp3o", "eager", "TRL", "Liger")
ABSENT = "–"


def load(path: Path) -> dict:
    record = json.loads(path.read_text())
    return record | {"benchmarks": joined(record["benchmarks"])} if "benchmarks" in record else record


def described(environment: dict) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items() if version)
    return f"{environment['device']}; {packages}; {environment['date']}"


def comparison(results: Results, level: str) -> list[list[str]]:
    """Forward and backward at each shape, fastest first. Header first."""
    bare = {"hidden": "products", "logits": "copy"}[level]  # timed in turns; no implementation can be faster
    lines = [["D, V", "N", "implementation", "ms", f"× bare {bare}", "extra GB"]]
    both = select(results, level=level, passes=BOTH)
    several = len({result.get("dtype") for result in both}) > 1
    for result in sorted(both, key=lambda result: (result["V"], result["D"], result["N"], result["ms"])):
        extra = NOT_MEASURED if result["extra_gb"] is None else f"{result['extra_gb']:.2f}"
        shape = f"{result['D']}, {result['V']}" + (f", {result['dtype']}" if several else "")
        figures = [f"{result['ms']:.2f}", f"{result['ratio_to_bare']:.2f}", extra]
        lines.append([shape, str(result["N"]), result["implementation"], *figures])
    return lines


def other_passes(results: Results) -> list[list[str]]:
    """Passes of fastp3o other than forward and backward together. Header first."""
    lines = [["level", "pass", "D, V", "N", "ms", "× bare operation", "GB/s", "TFLOP/s"]]
    several = len({result["dtype"] for result in results if "dtype" in result}) > 1
    for result in results:
        if result["implementation"] == "fastp3o" and result.get("passes", BOTH) != BOTH:
            rates = [f"{result[key]:.0f}" if result[key] else "" for key in ("gb_per_s", "tflop_per_s")]
            shape = f"{result['D']}, {result['V']}" + (f", {result['dtype']}" if several else "")
            figures = [f"{result['ms']:.2f}", f"{result['ratio_to_bare']:.2f}", *rates]
            lines.append([result["level"], result["passes"], shape, str(result["N"]), *figures])
    return lines


def ragged(P: int, K: int, response: int) -> list[int]:
    """Bounds of P groups of K responses, each of half to one and a half times the mean length."""
    seeded = torch.Generator().manual_seed(0)
    lengths = torch.randint(response // 2, 3 * response // 2 + 1, (P, K), generator=seeded)
    return [0, *lengths.sum(1).cumsum(0).tolist()]


# The head's tokens of some rows: responses to (prompts, mean tokens).
MODELLED = {"32 pairs, exactly 128": list(range(0, 8193, 256)), "19 pairs (350, 40)": ragged(19, 2, 40)}
MODELLED |= {"21 pairs (128, 128)": ragged(21, 2, 128), "4 pairs (350, 850)": ragged(4, 2, 850)}
MODELLED |= {"2 × 16 (256)": ragged(2, 16, 256)}


def modelled_ratio(bounds: list[int], head: HeadSizes, budget: int) -> float:
    """Time of the head's plan on an H100, forward and backward in bf16, over that of three products of its tokens."""
    N, dtypes = bounds[-1], HeadDtypes(*[torch.bfloat16] * 3, torch.float32)
    products = modelled_time(plan_chunks(bounds, head.vocabulary, dtypes, budget, triton=True))
    # Kernels over rows move 10 bytes a logit; reading the weight moves 2 an element.
    return (products + 5 * N * WEIGHT_ROWS / head.hidden) / (3 * N)


def modelled() -> list[list[str]]:
    """Predicted ratios with the least and the most memory budget. Header first."""
    lines = [["modelled, × bare products", "tokens", *(f"{D}, {V}" for D, V in LARGE_HEADS)]]
    for name, bounds in MODELLED.items():
        ratios = [[modelled_ratio(bounds, head, b) for b in (MEMORY_BUDGET, MOST_BUDGET)] for head in LARGE_HEADS]
        lines.append([name, str(bounds[-1]), *(f"{least:.2f} / {most:.2f}" for least, most in ratios)])
    return lines


def packing(results: Results) -> list[list[str]]:
    """Updates of the policy in each layout, fastest first. Header first."""
    lines = [["prompt, response", "K", "layout", "tokens computed", "ms", "speed, × plain packing", "extra GB"]]
    order = "prompt", "response", "K", "ratio_to_bare"
    for result in sorted(select(results, level="training"), key=lambda result: [result[key] for key in order]):
        lengths = f"{result['prompt']}, {result['response']}"
        figures = [f"{result['ms']:.0f}", f"{1 / result['ratio_to_bare']:.2f}", f"{result['extra_gb']:.2f}"]
        lines.append([lengths, str(result["K"]), result["implementation"], str(result["tokens"]), *figures])
    return lines


def markdown(lines: list[list[str]]) -> str:
    header, *rest = lines
    lines = [header, ["---"] * len(header), *rest]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plain(lines: list[list[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def goals_table(results: Results) -> list[list[str]]:
    verdicts = [(goal.what, goal.goal, *goal.verdict(results)) for goal in GOALS]
    return [["what", "goal", "measured", ""], *([*goal, "" if met == NOT_MEASURED else met] for *goal, met in verdicts)]


def absent(record: dict) -> str:
    """A list of the reasons why something was not measured, each with the measurements that it concerns."""
    reasons: dict[str, set[str]] = {}
    for entry in record["not_measured"]:
        reasons.setdefault(entry["reason"], set()).add(entry["name"].split("[")[0])
    return "\n".join(f"- {reason} ({', '.join(sorted(names))})" for reason, names in sorted(reasons.items()))


def between_markers(text: str, name: str, section: str) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if begin not in text or end not in text:
        raise ValueError(f"the text has no {begin} and {end} to write between")
    return text[: text.index(begin) + len(begin)] + f"\n{section}\n" + text[text.index(end) :]


def write_between(path: Path, name: str, section: str) -> None:
    path.write_text(between_markers(path.read_text(), name, section))


def iterations(results: Results) -> list[list[str]]:
    """Seconds of each trainer at each shape, by phase, in all and as multiples of fastp3o's. Header first."""
    lines = [["model", "P × K", "trainer", *PHASES, "in all", "×", "peak GB"]]
    for result in select(results, level="iteration"):
        lengths_of = f"{result['prompt']} + {result['response']} tokens"
        shape = [f"{described_model(result)}; {lengths_of}", f"{result['P']} × {result['K']}"]
        for name, figures in result["trainers"].items():
            if "absent" in figures:
                lines.append([*shape, name, *[""] * len(PHASES), f"absent: {figures['absent']}", "", ""])
                continue
            seconds = [cell(figures, f"{phase}_s", "{:.2f}") for phase in PHASES]
            in_all = [f"{figures['seconds']:.2f}", f"{figures['ratio']:.1f}", f"{figures['peak_gb']:.2f}"]
            lines.append([*shape, name, *seconds, *in_all])
    return lines


def described_model(result: dict) -> str:
    named = "" if result.get("model", "policy") in ("policy", "quickstart", "tiny") else f"{result['model']}: "
    return f"{named}D {result['D']}, {result['layers']} layers, V {result['V']}"


def objectives(cpu: Results, gpu: Results) -> list[list[str]]:
    """One row per objective; each cell has the numbers of all WAYS between slashes. Header first."""
    lines = [["objective", "operations, F", "extra MB", "× bare products, CPU", "× bare products, GPU"]]
    for name in dict.fromkeys(result["objective"] for result in select(cpu + gpu, level="objectives")):
        both = [select(results, level="objectives", objective=name) for results in (cpu, gpu)]
        counted = figures(both[0] or both[1], "counted_operations", "{:.3g}")
        extra = figures(both[0] or both[1], "extra_gb", "{:.0f}", 1e3)
        lines.append([name, counted, extra, *(figures(results, "ratio_to_bare", "{:.2f}") for results in both)])
    return lines


def figures(results: Results, key: str, form: str, times: float = 1.0) -> str:
    if not results:
        return NOT_MEASURED
    found = {result["implementation"]: result[key] for result in results if result[key] is not None}
    return " / ".join(form.format(times * found[way]) if way in found else ABSENT for way in WAYS)


def rollouts(results: Results) -> list[list[str]]:
    """Each way at each shape: tokens a second, and what a step takes. Header first."""
    sampled = select(results, level="rollouts")
    on_gpu = any("gpu_ms_per_step" in way for result in sampled for way in result["ways"].values())
    counted = "launches" if on_gpu else "operations"
    lines = [["model", "prompt + response", "K", "P", "way", "tokens/s", "×", "ms a step", f"{counted} a step"]]
    lines[0] += ["GPU ms a step", "share of the floor"] if on_gpu else []
    for result in sampled:
        shape = [described_model(result), lengths(result), str(result["K"]), str(result["P"])]
        for name, way in result["ways"].items():
            if "absent" in way:
                lines.append([*shape, name, f"absent: {way['absent']}", *[""] * (len(lines[0]) - 5)])
                continue
            cells = [f"{way['tokens_per_s']:.0f}", f"{way['ratio']:.2f}", f"{way['ms_per_step']:.1f}"]
            cells.append(cell(way, f"{counted}_per_step", "{:.0f}"))
            if on_gpu:
                cells.append(cell(way, "gpu_ms_per_step", "{:.2f}"))
                cells.append(f"{way['floor_ms'] / way['ms']:.0%}" if "floor_ms" in way else "")
            lines.append([*shape, name, *cells])
    return lines


def cell(way: dict, name: str, form: str) -> str:
    return form.format(way[name]) if name in way else ""


def lengths(result: dict) -> str:
    if result["mean"] is None:
        return f"{result['prompt']} + {result['response']}"
    return f"about {result['prompt']} + about {result['mean']}, at most {result['response']}"


def speeds(record: dict) -> list[list[str]]:
    rates = [record["speed"][f"tokens_per_{unit}"] for unit in ("second", "processor_second")]
    lines = [[name, *(f"{rate[name]:.0f}" for rate in rates)] for name in rates[0]]
    return [["sampler", "tokens/s", "tokens a processor second"], *lines]


def judged(*records: dict) -> Results:
    """The results that goals are about. On a CPU these are only rollouts and iterations, whose goals name a
    device.
    """
    results = []
    for record in records:
        cuda = bool(record["environment"]["cuda"])
        levels = ("rollouts", "iteration", "model")
        results += [result | {"cuda": cuda} for result in record["benchmarks"] if cuda or result["level"] in levels]
    return results


def write() -> None:
    """Writes what pages say of GPUs."""
    record = gpu_record()
    write_between(README, "gpu", gpu_sentence(record))
    FRONT_PAGE.write_text(with_gpu_limit(FRONT_PAGE.read_text(), record))


def gpu_record() -> dict | None:
    """What `run_gpu.sh` has measured on a GPU; None before."""
    path = RESULTS / "kernels.gpu.json"
    return load(path) if path.exists() else None


def gpu_sentence(record: dict | None) -> str:
    """What is known of GPUs."""
    if record is None:
        return "- All timings are from a CPU and small models: no GPU has been measured."
    verdicts = [goal.verdict(judged(record)).met for goal in GOALS if "CPU" not in goal.what]
    measured = [verdict for verdict in verdicts if verdict != NOT_MEASURED]
    met = f"{measured.count('met')} of {len(measured)} goals that were measured are met, {len(verdicts)} were set"
    return f"- On {described(record['environment'])}: [{met}](goals.py)."


def with_gpu_limit(front_page: str, record: dict | None) -> str:
    """The front page with its line about GPUs."""
    tested = "kernels are tested in an interpreter, and compiled for sm_80 to sm_100"
    line = f"- [No GPU timings](benchmarks/README.md) yet: {tested}."
    if record is not None:
        line = f"- [GPU timings](benchmarks/README.md) are of one machine: {record['environment']['device']}."
    changed, found = re.subn(r"(?m)^- \[(No )?GPU timings\].*$", lambda _: line, front_page)
    if found != 1:
        raise ValueError(f"{FRONT_PAGE} must have one line about GPU timings, and has {found}")
    return changed


def summary(records: Iterable[dict]) -> str:
    """Every table of the results of one or several runs, and the goals."""
    records = list(records)
    devices = [f"Measured on: {described(record['environment'])}" for record in records]
    results = [result for record in records for result in record["benchmarks"]]
    cpu, gpu = (
        [r for one in records if bool(one["environment"]["cuda"]) == cuda for r in one["benchmarks"]]
        for cuda in (False, True)
    )
    tables = [comparison(results, "hidden"), comparison(results, "logits"), other_passes(results), packing(results)]
    tables += [iterations(results), rollouts(results), objectives(cpu, gpu)]
    tables.append(goals_table(judged(*records)))
    return "\n\n".join(
        [*devices, *(plain(table) for table in tables if table[1:]), *filter(None, map(absent, records))]
    )


def committed() -> str:
    """The summary of all committed results, with what no suite measures."""
    paths = [path for pattern in ("*.cpu.json", "*.gpu.json") for path in sorted(RESULTS.glob(pattern))]
    predicted = [plain(modelled()), plain(predicted_iterations())]
    return "\n\n".join([summary(map(load, paths)), plain(speeds(load(RESULTS / "served.json"))), *predicted])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", help="JSON of one run; by default all committed ones.")
    parser.add_argument("--write", action="store_true", help="Write what pages say of the results.")
    arguments = parser.parse_args()
    if arguments.write:
        write()
    else:
        print(summary([load(arguments.results)]) if arguments.results else committed())


if __name__ == "__main__":
    main()
