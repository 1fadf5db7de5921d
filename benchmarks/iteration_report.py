"""The table of whole iterations, and the plot of where their time goes."""

from pathlib import Path

from benchmarks.goals import Results, select

# The phases in the order of an iteration, and their names in the plot.
LABELS = {
    "rollout": "rollout",
    "reward": "reward",
    "logprobs": "log-probs before the update",
    "update": "update, four epochs",
    "other": "other",
}


def iterations(results: Results) -> list[list[str]]:
    """Seconds of each trainer at each shape, by phase, in all and as multiples of fastp3o's. Header first."""
    lines = [["model", "P × K", "trainer", *LABELS, "in all", "×", "peak GB"]]
    for result in select(results, level="iteration"):
        shape = [described(result), f"{result['P']} × {result['K']}"]
        for name, figures in result["trainers"].items():
            if "absent" in figures:
                lines.append([*shape, name, *[""] * len(LABELS), f"absent: {figures['absent']}", "", ""])
                continue
            seconds = [f"{figures[f'{phase}_s']:.2f}" for phase in LABELS]
            in_all = [f"{figures['seconds']:.2f}", f"{figures['ratio']:.1f}", f"{figures['peak_gb']:.2f}"]
            lines.append([*shape, name, *seconds, *in_all])
    return lines


def described(result: dict) -> str:
    return (
        f"D {result['D']}, {result['layers']} layers, V {result['V']}; {result['prompt']} + {result['response']} tokens"
    )


def unit(results: Results) -> str:
    """The unit that the clock measured."""
    clocks = {result["clock"] for result in select(results, level="iteration")}
    return "seconds of processor time" if clocks == {"processor"} else "seconds"


def plot_iterations(record: dict, path: Path) -> None:
    """A panel for each shape, a bar for each trainer, stacked by phase."""
    # Tables need no matplotlib.
    from matplotlib.figure import Figure

    results = select(record["benchmarks"], level="iteration")
    figure = Figure(figsize=(3.4 * len(results), 4.4))
    for axis, result in zip(figure.subplots(1, len(results), squeeze=False)[0], results, strict=True):
        measured = {name: figures for name, figures in result["trainers"].items() if "absent" not in figures}
        bottoms = [0.0] * len(measured)
        for phase, label in LABELS.items():
            heights = [figures[f"{phase}_s"] for figures in measured.values()]
            axis.bar(list(measured), heights, 0.6, bottoms, label=label)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        for position, (figures, top) in enumerate(zip(measured.values(), bottoms, strict=True)):
            text = f"{top:.1f} s" if figures["ratio"] == 1 else f"{top:.1f} s, {figures['ratio']:.1f} ×"
            axis.annotate(text, (position, top), (0, 3), textcoords="offset points", ha="center", fontsize=9)
        axis.set_title(f"{described(result)}\n{result['P']} prompts, K {result['K']}", fontsize=9)
        axis.set_ylim(0, 1.12 * max(bottoms))
        axis.tick_params("x", labelsize=9)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    figure.axes[0].set_ylabel(unit(results))
    figure.suptitle(f"Where the time of an iteration goes: {record['environment']['device']}", fontsize=11)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="lower center", ncols=len(LABELS), fontsize=9)
    figure.savefig(path, dpi=130)
