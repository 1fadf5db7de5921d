"""Results of the suite -> tables and plots.

    python -m benchmarks.report RESULTS.json           # a short table
    python -m benchmarks.report --write                # tables of both READMEs, goals.md and the plots, from results/

Every number comes from the JSON; a number that it lacks is written "not measured".
"""

import argparse
import json
import re
from pathlib import Path

from benchmarks.goals import GOALS, NOT_MEASURED, Results, select
from benchmarks.iteration_report import iterations, plot_iterations, unit
from benchmarks.objectives_report import WAYS, objectives
from benchmarks.results_file import joined
from benchmarks.rollouts_report import plot_rollouts, rollouts
from benchmarks.served_report import measured_with, plot_served, served_runs, speeds

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
README = FOLDER / "README.md"
FRONT_PAGE = FOLDER.parent / "README.md"
PRECISION_README = FOLDER.parent / "fastp3o" / "training" / "README.md"
BOTH = "forward and backward"
# Levels that run by themselves on a CPU, where they take long.
SEPARATE_RUNS = ("iteration", "rollouts")
# The operation that a case is timed in turns with; no implementation can be faster.
BARE_OPERATIONS = {"hidden": "bare products", "logits": "bare copy"}


def load(path: Path) -> dict:
    record = json.loads(path.read_text())
    return record | {"benchmarks": joined(record["benchmarks"])} if "benchmarks" in record else record


def described(environment: dict) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items() if version)
    return f"{environment['device']}; {packages}; {environment['date']}"


def measured_on(record: dict) -> str:
    return f"Measured on: {described(record['environment'])}."


def comparison(results: Results, level: str) -> list[list[str]]:
    """Forward and backward at each shape, fastest first. Header first."""
    lines = [["D, V", "N", "implementation", "ms", f"× {BARE_OPERATIONS[level]}", "extra GB"]]
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


def packing(results: Results) -> list[list[str]]:
    """Updates of the policy in each layout, fastest first. Header first."""
    lines = [["prompt, response", "K", "layout", "tokens computed", "ms", "speed, × plain packing", "extra GB"]]
    order = "prompt", "response", "K", "ratio_to_bare"
    for result in sorted(select(results, level="training"), key=lambda result: [result[key] for key in order]):
        lengths = f"{result['prompt']}, {result['response']}"
        figures = [f"{result['ms']:.0f}", f"{1 / result['ratio_to_bare']:.2f}", f"{result['extra_gb']:.2f}"]
        lines.append([lengths, str(result["K"]), result["implementation"], str(result["tokens"]), *figures])
    return lines


def memory(results: Results) -> list[list[str]]:
    """The memory of each pass of an update, in MB. Header first."""
    parts = ["weights", "gradients", "optimizer", "activations", "head"]
    lines = [["pass", *parts]]
    for result in select(results, level="memory"):
        lines.append([result["passes"], *(f"{result[f'{part}_bytes'] / 1e6:.1f}" for part in parts)])
    return lines


def precision_table(record: dict) -> list[list[str]]:
    """Rounding of log-ratios in each precision of the policy. Header first."""
    rates = list(record["results"][0]["errors"])
    lines = [["policy", *(f"lr {float(rate):.0e}" for rate in rates), "ratio/noise"]]
    for result in record["results"]:
        noise = result.get("ratio/noise")
        cells = [f"{result['errors'][rate]:.2g}" for rate in rates]
        lines.append([result["precision"], *cells, "" if noise is None else f"{noise:.2g}"])
    return lines


def compiled_layer_table(record: dict) -> list[list[str]]:
    """What layers launch and move in training, plain and compiled. Header first."""
    lines = [["a layer, forward and backward", "launches besides attention", "GB moved besides products"]]
    for model, ways in record["layers"].items():
        plain, compiled = ways["plain"], [ways["forward"], ways["backward"]]
        launches = sum(part["launches"] for part in plain), sum(p["fused"] + p["products"] for p in compiled)
        moved = sum(part["other_bytes"] for part in plain), sum(part["fused_bytes"] for part in compiled)
        for way, count, size in zip(("as transformers has it", "compiled"), launches, moved, strict=True):
            lines.append([f"{model}, {way}", str(count), f"{size / 1e9:.1f}"])
    return lines


def decode_table(record: dict) -> list[list[str]]:
    """Launches of the body in a decode step by family, plain and compiled. Header first."""
    lines = [["family", "a layer", "compiled", "embedding, rotary tables, last norm", "compiled"]]
    names = "layer_uncompiled", "layer_compiled", "others_uncompiled", "others_compiled"
    return lines + [[family, *(str(found[name]) for name in names)] for family, found in record["decode"].items()]


def compiled_section(table: list[list[str]], record: dict) -> str:
    return f"{markdown(table)}\n\nCounted with torch {record['torch']}, transformers {record['transformers']}."


def markdown(lines: list[list[str]]) -> str:
    header, *rest = lines
    lines = [header, ["---"] * len(header), *rest]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plain(lines: list[list[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def goals_table(results: Results) -> list[list[str]]:
    lines = [["what", "goal", "measured", ""]]
    for goal in GOALS:
        found = goal.verdict(results)
        lines.append([goal.what, goal.goal, found.measured, "" if found.met == NOT_MEASURED else found.met])
    return lines


def absent(record: dict) -> str:
    """A list of the reasons why something was not measured, each with the measurements that it concerns."""
    reasons: dict[str, set[str]] = {}
    for entry in record["not_measured"]:
        reasons.setdefault(entry["reason"], set()).add(entry["name"].split("[")[0])
    return "\n".join(f"- {reason} ({', '.join(sorted(names))})" for reason, names in sorted(reasons.items()))


def plot(record: dict, path: Path) -> None:
    """Time, and memory if it was measured, over N at the first head: forward and backward, and the bare products."""
    # Tables need no matplotlib.
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    results = select(record["benchmarks"], level="hidden", passes=BOTH)
    D, V = results[0]["D"], results[0]["V"]
    same = {key: results[0].get(key) for key in ("D", "V", "dtype")}
    results = sorted(select(results, **same), key=lambda result: result["N"])
    with_memory = any(result["extra_gb"] for result in results)
    figure = Figure(figsize=(6 * (1 + with_memory), 5))
    axes = figure.subplots(1, 1 + with_memory, squeeze=False)
    panels = [("ms", "milliseconds")] + [("extra_gb", "GB beyond inputs and gradients")] * with_memory
    for axis, (key, label) in zip(axes[0], panels, strict=True):
        for name in dict.fromkeys(result["implementation"] for result in results):
            points = [(result["N"], result[key]) for result in select(results, implementation=name) if result[key]]
            emphasis = {"linewidth": 2.5, "zorder": 3} if name == "fastp3o" else {"linewidth": 1.2}
            axis.plot(*zip(*points, strict=True), marker="o", label=name, **emphasis)
        if key == "ms":
            bare = [(result["N"], result["bare_ms"]) for result in select(results, implementation="fastp3o")]
            axis.plot(*zip(*bare, strict=True), color="black", linestyle="--", label="three bare matrix products")
        axis.set(xscale="log", yscale="log", xlabel="N, response tokens", ylabel=label)
        ticks = sorted({result["N"] for result in results})
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.grid(alpha=0.3)
    figure.suptitle(
        f"P3O's loss, forward and backward, D {D}, V {V}, on {record['environment']['device']}", fontsize=11
    )
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=130)


def benchmarks_section(record: dict, on_gpu: bool) -> str:
    """What a run that ended early lacks is named."""
    parts = [measured_on(record)]
    if not on_gpu:
        parts.append("No GPU figure has been measured yet; [`goals.md`](goals.md) has the open cells.")
    results = record["benchmarks"]
    tables = {
        "From hidden states to gradients, forward and backward, next to the three bare matrix products:": comparison(
            results, "hidden"
        ),
        "From logits, next to a bare copy of the bytes that must move:": comparison(results, "logits"),
    }
    for title, table in tables.items():
        parts += [title, markdown(table) if table[1:] else "Not measured."]
    if select(results, level="hidden", passes=BOTH):
        parts.append("![time over N](results/kernels.png)")
    if updates := select(results, level="training"):
        parts += [f"Training on packed rows: {policy_description(updates[0])}", markdown(packing(results))]
    if select(results, level="memory"):
        parts += [
            "Memory of each pass in MB (shared prompts of 350 tokens, 2 responses of 40; head: its part of the peak):"
        ]
        parts += [markdown(memory(results))]
    return "\n\n".join(parts)


def objectives_section(cpu: dict, gpu: dict | None) -> str:
    one = select(cpu["benchmarks"], level="objectives")[0]
    shape = f"N {one['N']}, D {one['D']}, V {one['V']}, {one['dtype']}"
    on_gpu = "No GPU figure has been measured yet."
    if gpu and (found := select(gpu["benchmarks"], level="objectives")):
        on_gpu = "N {N}, D {D}, V {V}, {dtype} on the GPU: ".format(**found[0]) + described(gpu["environment"]) + "."
    times = f"Times on the CPU: {one['clock']} time, the least of all rounds."
    first = f"{measured_on(cpu)} {shape}. {times} {on_gpu} F = N V D. Each cell has {' / '.join(WAYS)}."
    table = objectives(cpu["benchmarks"], gpu["benchmarks"] if gpu else [])
    return f"{first}\n\n{markdown(table)}"


def iteration_section(record: dict) -> str:
    results = record["benchmarks"]
    first = f"{measured_on(record)} In {unit(results)}; `×`: of fastp3o's, the median of turns."
    if not record["environment"]["cuda"]:
        first += " No GPU figure has been measured yet."
    return "\n\n".join([first, markdown(iterations(results)), "![where the time goes](results/iteration.png)"])


def rollouts_section(record: dict) -> str:
    first = f"{measured_on(record)} `×`: of the tokens per second of `generate`, the median of rounds."
    if not record["environment"]["cuda"]:
        first += " No GPU figure has been measured yet."
    return "\n\n".join([first, markdown(rollouts(record["benchmarks"])), "![tokens per second](results/rollouts.png)"])


def served_section(record: dict) -> str:
    plotted = "![where the time of an update goes](results/served.png)"
    return "\n\n".join([measured_with(record), markdown(speeds(record)), markdown(served_runs(record)), plotted])


def policy_description(update: dict) -> str:
    return (
        "forward and backward of one update of a random Llama with "
        f"{update['parameters'] / 1e6:.1f} M parameters (D {update['D']}, V {update['V']}, {update['dtype']}). Lengths "
        "of prompts and responses vary by half around these means; K responses to a prompt; extra memory is beyond "
        "weights and gradients:"
    )


def precision_section(record: dict) -> str:
    device = f"{record['device']}, torch {record['torch']}"
    policy = f"a Llama of {record['parameters'] / 1e6:.1f} M parameters, {record['nats_per_token']:.2f} nats a token"
    return f"{markdown(precision_table(record))}\n\n{device}; {policy}; {record['responses']} responses."


def between_markers(text: str, name: str, section: str) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if begin not in text or end not in text:
        raise ValueError(f"the text has no {begin} and {end} to write between")
    return text[: text.index(begin) + len(begin)] + f"\n{section}\n" + text[text.index(end) :]


def write_between(path: Path, name: str, section: str) -> None:
    path.write_text(between_markers(path.read_text(), name, section))


def judged(*records: dict) -> Results:
    """The results that goals are about. On a CPU these are only rounding, which does not depend on the device, and
    rollouts and iterations, whose goals name a device.
    """
    results = []
    for record in records:
        cuda = bool(record["environment"]["cuda"])
        levels = ("precision", "rollouts", "iteration")
        results += [result | {"cuda": cuda} for result in record["benchmarks"] if cuda or result["level"] in levels]
    return results


def write() -> None:
    """Tables and plots from the GPU's results if there are any, otherwise from the CPU's."""
    gpu, cpu = RESULTS / "kernels.gpu.json", RESULTS / "kernels.cpu.json"
    on_gpu = gpu.exists()
    record = load(gpu if on_gpu else cpu)
    write_between(README, "benchmarks", benchmarks_section(record, on_gpu))
    write_between(PRECISION_README, "precision", precision_section(load(RESULTS / "policy_precision.json")))
    counts = load(RESULTS / "compiled_counts.json")
    write_between(README, "decode", compiled_section(decode_table(counts), counts))
    write_between(PRECISION_README, "compiled layers", compiled_section(compiled_layer_table(counts), counts))
    (FOLDER / "goals.md").write_text(goals_page(record, on_gpu))
    if select(record["benchmarks"], level="hidden", passes=BOTH):
        plot(record, RESULTS / "kernels.png")
    write_between(README, "objectives", objectives_section(*objective_records()))
    write_between(README, "gpu", gpu_sentence(record if on_gpu else None))
    FRONT_PAGE.write_text(with_gpu_limit(FRONT_PAGE.read_text(), record if on_gpu else None))
    record = level_record("iteration")
    write_between(README, "iteration", iteration_section(record))
    plot_iterations(record, RESULTS / "iteration.png")
    record = level_record("rollouts")
    write_between(README, "rollouts", rollouts_section(record))
    plot_rollouts(record, RESULTS / "rollouts.png")
    record = load(RESULTS / "served.json")
    write_between(README, "served", served_section(record))
    plot_served(record, RESULTS / "served.png")


def goals_page(record: dict, on_gpu: bool) -> str:
    """The goals with what the GPU's results say of them, and the CPU's where a goal names one."""
    device = "no GPU has been measured; precision, rollouts and iterations on a CPU"
    if on_gpu:
        device = f"{described(record['environment'])}; rollouts and iterations on a CPU where a goal says so"
    records = [record, *(load(path) for level in SEPARATE_RUNS for path in sorted(RESULTS.glob(f"{level}.?pu.json")))]
    page = f"# Goals\n\nThe worst of all heads and numbers of tokens. Results of: {device}.\n\n"
    page += markdown(goals_table(judged(*records))) + "\n"
    if on_gpu:
        page += f"\nAll passes of fastp3o:\n\n{markdown(other_passes(record['benchmarks']))}\n"
    return page + (f"\nNot measured, with the reason:\n\n{absent(record)}\n" if record["not_measured"] else "")


def goals_met(record: dict) -> str:
    verdicts = [goal.verdict(judged(record)).met for goal in GOALS if "CPU" not in goal.what]
    measured = [verdict for verdict in verdicts if verdict != NOT_MEASURED]
    return f"{measured.count('met')} of {len(measured)} goals that were measured are met, {len(verdicts)} were set"


def gpu_sentence(record: dict | None) -> str:
    """What is known of GPUs."""
    if record is None:
        no_gpu = "no GPU has been measured; [`goals.md`](goals.md) has the open cells."
        return f"- All timings are from a CPU and small models: {no_gpu}"
    return f"- On {described(record['environment'])}: [{goals_met(record)}](goals.md)."


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


def objective_records() -> tuple[dict, dict | None]:
    """The CPU's record and, if there is one, the GPU's, which is the whole suite's."""
    gpu = RESULTS / "kernels.gpu.json"
    return load(RESULTS / "objectives.cpu.json"), load(gpu) if gpu.exists() else None


def level_record(level: str) -> dict:
    """The GPU's results if there are any, from the whole suite's run or one of the level's own."""
    for name in ("kernels.gpu", f"{level}.gpu", f"{level}.cpu"):
        path = RESULTS / f"{name}.json"
        if path.exists() and select((record := load(path))["benchmarks"], level=level):
            return record
    raise FileNotFoundError(f"{RESULTS} has no results of {level}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", help="JSON of one run, for a short table.")
    parser.add_argument("--write", action="store_true", help="Rewrite both READMEs' tables, goals.md and the plots.")
    arguments = parser.parse_args()
    if not arguments.results and not arguments.write:
        parser.error("give a JSON for a table, or --write")
    if arguments.results:
        print(summary(load(arguments.results)))
    if arguments.write:
        write()


def summary(record: dict) -> str:
    """Every table of a run's results, for a terminal."""
    results = record["benchmarks"]
    parts = [plain(goals_table(judged(record))), absent(record)]
    for level in ("hidden", "logits"):
        measured = select(results, level=level)
        first = select(measured, **{key: measured[0][key] for key in "NDV"}) if measured else []
        parts.append(plain(comparison(first, level)) if first else "")
    tables = [packing(results), memory(results), iterations(results), rollouts(results)]
    by_device = ([], results) if record["environment"]["cuda"] else (results, [])
    tables.append(objectives(*by_device))
    return "\n\n".join([part for part in parts if part] + [plain(table) for table in tables if table[1:]])


if __name__ == "__main__":
    main()
