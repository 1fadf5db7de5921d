"""The table of rollouts, and the plot of tokens per second."""

from pathlib import Path

from benchmarks.goals import Results, select

NOT_COUNTED = ""


def rollouts(results: Results) -> list[list[str]]:
    """Each way at each shape: speed, and tokens computed and bytes read per token of the responses. Header first."""
    counted = "launches" if any("gpu_ms_per_step" in way for way in all_ways(results)) else "operations"
    lines = [["model", "prompt + response", "K", "way", "tokens/s", "×", "ms a step", f"{counted} a step"]]
    lines[0] += ["tokens computed", "MB read"]
    if counted == "launches":
        lines[0] += ["GPU ms a step", "share of the floor"]
    for result in select(results, level="rollouts"):
        shape = [described(result), lengths(result), str(result["K"])]
        for name, way in result["ways"].items():
            if "absent" in way:
                lines.append([*shape, name, f"absent: {way['absent']}", *[""] * (len(lines[0]) - 5)])
                continue
            cells = [f"{way['tokens_per_s']:.0f}", f"{way['ratio']:.2f}", f"{way['ms_per_step']:.1f}"]
            cells.append(cell(way, f"{counted}_per_step", "{:.0f}"))
            cells += [f"{way['computed_per_token']:.1f}", f"{way['bytes_read_per_token'] / 1e6:.2f}"]
            if counted == "launches":
                cells.append(cell(way, "gpu_ms_per_step", "{:.2f}"))
                cells.append(f"{way['floor_ms'] / way['ms']:.0%}" if "floor_ms" in way else NOT_COUNTED)
            lines.append([*shape, name, *cells])
    return lines


def all_ways(results: Results) -> list[dict]:
    return [way for result in select(results, level="rollouts") for way in result["ways"].values()]


def cell(way: dict, name: str, form: str) -> str:
    return form.format(way[name]) if name in way else NOT_COUNTED


def described(result: dict) -> str:
    return f"D {result['D']}, {result['layers']} layers, V {result['V']}"


def lengths(result: dict) -> str:
    if result["mean"] is None:
        return f"{result['prompt']} + {result['response']}"
    return f"about {result['prompt']} + about {result['mean']}, at most {result['response']}"


def tick(result: dict) -> str:
    """The shape's label below the axis."""
    return f"D {result['D']}, K {result['K']}\n" + lengths(result).replace(" + ", "\n+ ").replace(", at", "\nat")


def plot_rollouts(record: dict, path: Path) -> None:
    """A group of bars for each shape: tokens per second as multiples of `generate`'s."""
    # Tables need no matplotlib.
    from matplotlib.figure import Figure

    results = select(record["benchmarks"], level="rollouts")
    names = list(dict.fromkeys(name for result in results for name in result["ways"]))
    figure = Figure(figsize=(1.05 * len(results) + 1.5, 4.8))
    axis = figure.subplots()
    width = 0.85 / len(names)
    for number, name in enumerate(names):
        ratios = [result["ways"].get(name, {}).get("ratio") for result in results]
        places = [place + (number - (len(names) - 1) / 2) * width for place, ratio in enumerate(ratios) if ratio]
        bars = axis.bar(places, [ratio for ratio in ratios if ratio], width, label=name, zorder=2)
        if name == "fastp3o engine":
            axis.bar_label(bars, fmt="{:.1f}", fontsize=8, padding=2)
    axis.set_xticks(range(len(results)), [tick(result) for result in results], fontsize=7.5)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_ylabel("tokens per second, × generate")
    axis.grid(axis="y", alpha=0.3)
    figure.suptitle(f"Rollouts ({record['environment']['device']})", fontsize=11)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.legend(*axis.get_legend_handles_labels(), loc="lower center", ncols=len(names), fontsize=9)
    figure.savefig(path, dpi=130)
