"""Results of the suite -> tables. Every number comes from a JSON; one that it lacks is written "not
measured".

python -m benchmarks.report                        # every table and the goals, of the committed results
python -m benchmarks.report RESULTS.json           # the tables of one run
python -m benchmarks.report --write                # what pages say of the committed results (`pages/`)
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

from benchmarks.environment import described
from benchmarks.goals import goals_table
from benchmarks.modeled import modeled
from benchmarks.pages import sections
from benchmarks.predicted_iteration import predicted_iterations
from benchmarks.records import (
    CPU_RECORDS,
    GPU_RECORD,
    NOT_MEASURED,
    RESULTS,
    Results,
    load,
    results_of,
    select,
)

BOTH = "forward and backward"
# Of an iteration, in their order; an update is four epochs.
PHASES = ("rollout", "reward", "logprobs", "update", "other")
WAYS = ("fastp3o", "eager", "TRL", "Liger")
ABSENT = "–"


def comparison(results: Results, level: str) -> list[list[str]]:
    """Forward and backward at each shape, fastest first. Header first."""
    # timed in turns; no implementation can be faster
    bare = {"hidden": "products", "logits": "copy"}[level]
    lines = [["D, V", "N", "implementation", "ms", f"× bare {bare}", "extra GB"]]
    both = select(results, level=level, passes=BOTH)
    several = len({result.get("dtype") for result in both}) > 1
    for result in sorted(
        both, key=lambda result: (result["V"], result["D"], result["N"], result["ms"])
    ):
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
            rates = [
                f"{result[key]:.0f}" if result[key] else "" for key in ("gb_per_s", "tflop_per_s")
            ]
            shape = f"{result['D']}, {result['V']}" + (f", {result['dtype']}" if several else "")
            figures = [f"{result['ms']:.2f}", f"{result['ratio_to_bare']:.2f}", *rates]
            lines.append([result["level"], result["passes"], shape, str(result["N"]), *figures])
    return lines


def packing(results: Results) -> list[list[str]]:
    """Updates of the policy in each layout, fastest first. Header first."""
    lines = [
        [
            "prompt, response",
            "K",
            "layout",
            "tokens computed",
            "ms",
            "speed, × plain packing",
            "extra GB",
        ]
    ]
    order = "prompt", "response", "K", "ratio_to_bare"
    for result in sorted(
        select(results, level="training"), key=lambda result: [result[key] for key in order]
    ):
        lengths = f"{result['prompt']}, {result['response']}"
        figures = [
            f"{result['ms']:.0f}",
            f"{1 / result['ratio_to_bare']:.2f}",
            f"{result['extra_gb']:.2f}",
        ]
        lines.append(
            [lengths, str(result["K"]), result["implementation"], str(result["tokens"]), *figures]
        )
    return lines


def body(results: Results) -> list[list[str]]:
    """Passes, rollouts and launches by what computes the layers. Header first."""
    lines = [["layers", "what", "ms", "× products", "extra GB"]]
    for one in [*select(results, level="model"), *select(results, level="layers")]:
        extra = cell(one, "extra_gb", "{:.2f}") if one["extra_gb"] is not None else ""
        lines.append(
            [
                one["implementation"],
                one["passes"],
                f"{one['ms']:.1f}",
                f"{one['ratio_to_bare']:.2f}",
                extra,
            ]
        )
    for one in select(results, level="engine"):
        parts = f"rollouts: {one['prefill_ms']:.1f} ms of prompts, {one['decode_ms']:.1f} of steps"
        lines.append([one["implementation"], parts, f"{one['ms']:.1f}", "", ""])
    for one in select(results, level="kernels"):
        lines.append(
            [
                one["implementation"],
                f"update: {one['launches']:,} launches",
                f"{one['gpu_ms']:.1f}",
                "",
                "",
            ]
        )
    return lines


def kernels(results: Results) -> list[list[str]]:
    """The longest kernels of an update. Header first."""
    lines = [["layers", "kernel", "launches", "ms"]]
    for one in select(results, level="kernels"):
        lines += [
            [one["implementation"], name, str(count), f"{ms:.2f}"]
            for name, count, ms in one["kernels"]
        ]
    return lines


def training_runs(results: Results) -> list[list[str]]:
    """Reward of each update, median seconds by phase, and the peak beside what `fastp3o memory`
    gives. Header first.
    """
    phases = [phase for phase in PHASES if phase != "other"]
    lines = [["model", "P × K", *phases, "peak GB", "predicted", "rewards"]]
    for run in select(results, level="training run"):
        seconds = [f"{run[f'{phase}_s']:.2f}" for phase in phases]
        memory = [f"{run['peak_gb']:.2f}", f"{run['predicted_gb']:.2f}"]
        rewards = " ".join(f"{reward:.2f}" for reward in run["rewards"])
        lines.append([described_model(run), f"{run['P']} × {run['K']}", *seconds, *memory, rewards])
    return lines


def plain(lines: list[list[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def absent(record: dict) -> str:
    """A list of the reasons why something was not measured, each with the measurements that it
    concerns.
    """
    reasons: dict[str, set[str]] = {}
    for entry in record["not_measured"]:
        reasons.setdefault(entry["reason"], set()).add(entry["name"].split("[")[0])
    return "\n".join(
        f"- {reason} ({', '.join(sorted(names))})" for reason, names in sorted(reasons.items())
    )


def iterations(results: Results) -> list[list[str]]:
    """Seconds of each trainer at each shape, by phase, in all and as multiples of fastp3o's. Header
    first.
    """
    lines = [["model", "P × K", "trainer", *PHASES, "in all", "×", "peak GB"]]
    for result in select(results, level="iteration"):
        lengths_of = f"{result['prompt']} + {result['response']} tokens"
        shape = [f"{described_model(result)}; {lengths_of}", f"{result['P']} × {result['K']}"]
        for name, figures in result["trainers"].items():
            if "absent" in figures:
                lines.append(
                    [*shape, name, *[""] * len(PHASES), f"absent: {figures['absent']}", "", ""]
                )
                continue
            seconds = [cell(figures, f"{phase}_s", "{:.2f}") for phase in PHASES]
            in_all = [
                f"{figures['seconds']:.2f}",
                f"{figures['ratio']:.1f}",
                f"{figures['peak_gb']:.2f}",
            ]
            lines.append([*shape, name, *seconds, *in_all])
    return lines


def described_model(result: dict) -> str:
    named = (
        ""
        if result.get("model", "policy") in ("policy", "quickstart", "tiny")
        else f"{result['model']}: "
    )
    return f"{named}D {result['D']}, {result['layers']} layers, V {result['V']}"


def objectives(cpu: Results, gpu: Results) -> list[list[str]]:
    """One row per objective; each cell has the numbers of all WAYS between slashes. Header first."""
    lines = [
        ["objective", "operations, F", "extra MB", "× bare products, CPU", "× bare products, GPU"]
    ]
    for name in dict.fromkeys(
        result["objective"] for result in select(cpu + gpu, level="objectives")
    ):
        both = [select(results, level="objectives", objective=name) for results in (cpu, gpu)]
        counted = figures(both[0] or both[1], "counted_operations", "{:.3g}")
        extra = figures(both[0] or both[1], "extra_gb", "{:.0f}", 1e3)
        lines.append(
            [
                name,
                counted,
                extra,
                *(figures(results, "ratio_to_bare", "{:.2f}") for results in both),
            ]
        )
    return lines


def figures(results: Results, key: str, form: str, times: float = 1.0) -> str:
    if not results:
        return NOT_MEASURED
    found = {result["implementation"]: result[key] for result in results if result[key] is not None}
    return " / ".join(form.format(times * found[way]) if way in found else ABSENT for way in WAYS)


def rollouts(results: Results) -> list[list[str]]:
    """Each way at each shape: tokens a second, and what a step takes. Header first."""
    sampled = select(results, level="rollouts")
    on_gpu = any(
        "launches_per_step" in way for result in sampled for way in result["ways"].values()
    )
    counted = "launches" if on_gpu else "operations"
    lines = [
        [
            "model",
            "prompt + response",
            "K",
            "P",
            "way",
            "tokens/s",
            "×",
            "ms a step",
            f"{counted} a step",
        ]
    ]
    lines[0] += ["GPU ms a step", "share of the floor"] if on_gpu else []
    for result in sampled:
        shape = [described_model(result), lengths(result), str(result["K"]), str(result["P"])]
        for name, way in result["ways"].items():
            if "absent" in way:
                lines.append(
                    [*shape, name, f"absent: {way['absent']}", *[""] * (len(lines[0]) - 6)]
                )
                continue
            cells = [
                f"{way['tokens_per_s']:.0f}",
                f"{way['ratio']:.2f}",
                f"{way['ms_per_step']:.1f}",
            ]
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


def summary(records: Iterable[dict]) -> str:
    """Every table of the results of one or several runs, and the goals."""
    records = list(records)
    devices = [f"Measured on: {described(record['environment'])}" for record in records]
    results = [result for record in records for result in record["benchmarks"]]
    cpu, gpu = (
        [
            r
            for one in records
            if bool(one["environment"]["cuda"]) == cuda
            for r in one["benchmarks"]
        ]
        for cuda in (False, True)
    )
    tables = [
        comparison(results, "hidden"),
        comparison(results, "logits"),
        other_passes(results),
        packing(results),
    ]
    tables += [body(results), kernels(results), training_runs(results)]
    tables += [iterations(results), rollouts(results), objectives(cpu, gpu)]
    tables.append(goals_table(results_of(records)))
    return "\n\n".join(
        [
            *devices,
            *(plain(table) for table in tables if table[1:]),
            *filter(None, map(absent, records)),
        ]
    )


def committed() -> str:
    """The summary of all committed results, with what no suite measures."""
    paths = [RESULTS / name for name in (*CPU_RECORDS, GPU_RECORD)]
    predicted = [plain(modeled()), plain(predicted_iterations())]
    return "\n\n".join(
        [summary(map(load, paths)), plain(speeds(load(RESULTS / "served.json"))), *predicted]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "results", type=Path, nargs="?", help="JSON of one run; by default all committed ones."
    )
    parser.add_argument("--write", action="store_true", help="Write what pages say of the results.")
    arguments = parser.parse_args()
    if arguments.write:
        sections.write()
    else:
        print(summary([load(arguments.results)]) if arguments.results else committed())


if __name__ == "__main__":
    main()
