"""What rewards may add: offsets of several sizes, and a scale that differs between prompts."""

from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.frontier.report import cells, many
from benchmarks.frontier.report.drawing import LOOKS, bars, finish
from benchmarks.frontier.report.rows import Mark, Row, draw
from benchmarks.frontier.report.study import Study
from benchmarks.frontier.runs import rewards
from benchmarks.frontier.runs.plan import BETA, Run
from benchmarks.frontier.runs.tuned_arms import arm
from fastp3o.evaluation.matched_kl import Estimate

HEADER = ["deviation", "algorithm"]


def ppo(deviation: float, rate: float) -> Run:
    """PPO under an offset of this standard deviation."""
    fields = {"offset": "unlearnable", "offset_sd": deviation} if deviation else {}
    return replace(arm("ppo"), learning_rate=rate, **fields)


def doses() -> dict[tuple[str, ...], Run]:
    """PPO at every rate under every offset, and what no offset moves."""
    found = {
        (f"{sd:g}", f"PPO, {cells.rate(rate)}"): ppo(sd, rate)
        for sd in rewards.DEVIATIONS
        for rate in rewards.PPO_RATES
    }
    return found | {("any", many.name_of(one)): one for one in rewards.without_offset()}


def losses() -> many.Pairs:
    """PPO under every offset against itself without, and joint P3O against PPO; what the prompt's mean costs PPO."""
    joint, centred, pairs = arm("joint"), arm("ppo_centred"), {}
    for deviation in rewards.DEVIATIONS:
        for rate in rewards.PPO_RATES:
            named, own = f"PPO, {cells.rate(rate)}", ppo(deviation, rate)
            if deviation:
                pairs[f"{deviation:g}", named, "itself without"] = own, ppo(0.0, rate)
            pairs[f"{deviation:g}", many.name_of(joint), named] = joint, own
    pairs["any", many.name_of(joint), many.name_of(centred)] = joint, centred
    pairs["0", many.name_of(centred), "PPO, 3e-4"] = centred, ppo(0.0, 3e-4)
    return pairs


def different_weights(study: Study) -> list[list[str]]:
    """How many different weights the invariant algorithms end with under the offsets; 1 is bit for bit. Header first.

    Runs without an offset are left out: some were made on another machine, which rounds otherwise.
    """
    digits = study.records.runs.set_index("name")["sha256"]
    lines = [["algorithm", "offsets", "different weights"]]
    for one in rewards.without_offset():
        seed, task = rewards.RESULTS[0]
        plain = replace(one, task=task, seed=seed, learning_rate=many.rate_of(study, one) or 0.0)
        shifted = [replace(plain, offset="unlearnable", offset_sd=sd) for sd in rewards.DEVIATIONS if sd]
        ran = [digits[run.name] for run in shifted if run.name in digits]
        if ran:
            lines.append([many.name_of(one), str(len(ran)), str(len(set(ran)))])
    return lines


def scaled() -> dict[tuple[str, ...], Run]:
    """Algorithms by spread of the factor and K."""
    return {
        (f"{one.reward_spread:g}", str(one.responses_per_prompt), many.name_of(one)): one for one in rewards.scales()
    }


def scaled_pairs() -> many.Pairs:
    """Joint P3O against all others, its variants against GRPO, and what the spread costs each."""
    arms, pairs = scaled(), {}
    for (spread, responses, name), one in arms.items():
        if one.algorithm in ("joint-group", "joint-difference"):
            rival = arm("grpo", one.responses_per_prompt, reward_spread=one.reward_spread)
            pairs[spread, responses, name, many.name_of(rival)] = one, rival
        if one.algorithm != "joint":
            joint = arm("joint", one.responses_per_prompt, reward_spread=one.reward_spread)
            pairs[spread, responses, many.name_of(joint), name] = joint, one
        if one.reward_spread:
            pairs[spread, responses, name, "itself without"] = one, replace(one, reward_spread=0.0)
    return pairs


def figure(study: Study, path: Path) -> bool:
    """Reward − BETA KL over the offset's deviation."""
    points = {
        rate: [(sd, many.difference(study, (ppo(sd, rate), arm("joint")), "end")) for sd in rewards.DEVIATIONS]
        for rate in rewards.PPO_RATES
    }
    if any(estimate is None for line in points.values() for _, estimate in line):
        return False
    page = Figure(figsize=(7, 4.4), layout="constrained")
    axes = page.subplots()
    for number, (rate, line) in enumerate(points.items()):
        look = {"color": LOOKS["ppo"]["color"], "linestyle": ("-", "--", ":")[number], "marker": "D", "markersize": 4}
        found: list[Estimate] = [estimate for _, estimate in line if estimate is not None]
        label = f"PPO, rate {cells.rate(rate)}"
        means = [estimate.mean for estimate in found]
        axes.errorbar([sd for sd, _ in line], means, yerr=bars([one[:3] for one in found]), label=label, **look)
    for algorithm in rewards.INVARIANT:
        estimate = many.difference(study, (arm(algorithm), arm("joint")), "end")
        if estimate is not None:
            name = many.name_of(arm(algorithm))
            axes.axhline(estimate.mean, color=LOOKS[algorithm]["color"], label=f"{name}, any offset")
    axes.set(xlabel="standard deviation of the offset, in those of the reward")
    axes.set_ylabel(f"reward − {BETA:g} KL, less joint P3O")
    finish(
        page, [axes], "Offsets that nothing predicts, 4 responses to a prompt: paired differences over languages", path
    )
    return True


MARKS = {"plain": Mark("o", "plain rewards", filled=False), "scaled": Mark("D", "a factor for every prompt")}


def scales_figure(study: Study, path: Path) -> bool:
    """What every algorithm reaches with a factor that differs between prompts, and without."""
    panels = {}
    for responses in (4, 16):
        start = arm("joint", responses)
        plain = [one for one in rewards.scales() if one.responses_per_prompt == responses and not one.reward_spread]
        panels[f"{responses} responses to a prompt"] = [
            Row(
                one,
                {
                    "plain": many.difference(study, (one, start), "end"),
                    "scaled": many.difference(study, (replace(one, reward_spread=rewards.SPREAD), start), "end"),
                },
            )
            for one in plain
        ]
    title = f"Reward − {BETA:g} KL after training on rewards with a log-normal factor (σ 1) for every prompt"
    return draw(panels, MARKS, minus="joint P3O with plain rewards", title=title, path=path)
