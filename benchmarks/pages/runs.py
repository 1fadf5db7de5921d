"""Pages of the trainer and of scripts: what runs of small models gave."""

import statistics

from benchmarks.markdown import markdown
from benchmarks.pages.sources import EXPLOITED, SEEDS, Records, Section

# Of 95%, by degrees of freedom.
STUDENT = {3: 3.182, 7: 2.365}
PPO, AT_THE_END = "PPO", "PPO, rewards at the end"
# As the page has them.
GAME_NAMES = {
    PPO: "PPO, rewards of turns where they come",
    AT_THE_END: "PPO, all at the end (`--process_rewards false`)",
}


def mean_and_interval(values: list[float]) -> str:
    """With half of the interval of 95%, by Student's t."""
    half = STUDENT[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {half:.3f}"


def precision(records: Records) -> str:
    record = records["policy_precision.json"]
    rates = "1e-06", "1e-05", "0.0001"
    lines = [["policy", "lr 1e-06", "lr 1e-05", "lr 1e-04", "ratio/noise"]]
    for one in record["results"]:
        errors = [f"{one['errors'][rate]:.2g}" for rate in rates]
        noise = one.get("ratio/noise")
        lines.append([one["precision"], *errors, "" if noise is None else f"{noise:.2g}"])
    return markdown(lines)


def rounding_by_length(records: Records) -> str:
    by_precision = records["rounding_by_length.json"]["precisions"]
    names = [f"error: {name}" for name in by_precision]
    lines = [["tokens", "windows", "true log-ratio", *names, "pairs beyond: bf16", "fp16"]]
    for of_length in zip(*by_precision.values(), strict=True):
        by_name = dict(zip(by_precision, of_length, strict=True))
        first = of_length[0]
        errors = [f"{one['error']:.2g}" for one in of_length]
        beyond = [f"{by_name[name]['pairs_beyond']:.0%}" for name in ("bf16", "fp16")]
        shown = [str(first["length"]), str(first["windows"]), f"{first['truth']:.2g}"]
        lines.append([*shown, *errors, *beyond])
    return markdown(lines)


def trpo(records: Records) -> str:
    """Four seeds each: a difference with its interval of 95% by Student's t."""
    runs = records["trpo.json"]["runs"]
    key = "reward_less_0.1_kl"
    ahead, behind = (
        [own[key] - ppo[key] for own, ppo in zip(runs[name], runs["ppo"], strict=True)]
        for name in ("trpo, max_kl 0.01", "trpo, max_kl 0.003")
    )
    kl, ppo_kl = (
        statistics.mean(run["kl"] for run in runs[name]) for name in ("trpo, max_kl 0.01", "ppo")
    )
    return (
        f"{mean_and_interval(ahead)} (95%) ahead of tuned PPO "
        f"in\nreward − 0.1 KL, at a KL of {kl:.1f} instead of {ppo_kl:.1f}; 0.003 was "
        f"{-statistics.mean(behind):.2f} behind"
    )


def seeds(records: Records) -> str:
    held_out = "held-out labels that the reward model has right"
    lines = [["seed", held_out, "sampled before", "sampled after", "greedy before", "greedy after"]]
    for seed, found in enumerate(records[SEEDS]):
        sampled = [
            f"{found[f'sampled {when}']:.2f} ± {found[f'deviation {when}']:.2f}"
            for when in ("before", "after")
        ]
        greedy = [f"{found[f'greedy {when}']:.2f}" for when in ("before", "after")]
        lines.append([str(seed), f"{found['accuracy']:g}", *sampled, *greedy])
    return markdown(lines)


def exploited(records: Records) -> str:
    lines = [
        [
            "update",
            "reward of the reward model",
            "overlap with the true summaries",
            "response, tokens",
        ]
    ]
    lines[0] += ["without an end", "KL, nats"]
    for one in records[EXPLOITED]:
        figures = [f"{one['reward']:.2f}", f"{one['gold']:.3f}", f"{one['response_length']:.1f}"]
        lines.append([str(one["step"]), *figures, f"{one['missing_eos']:.0%}", f"{one['kl']:.1f}"])
    return markdown(lines)


def real_task(name: str) -> Section:
    """P3O's evaluations on a real model. name: of a record."""

    def table(records: Records) -> str:
        lines = [
            [
                "update",
                "its reward model",
                "the judge",
                "response, tokens",
                "without an end",
                "KL, nats",
            ]
        ]
        for one in records[name]["p3o"]:
            scores = [f"{one['reward']:.2f}", f"{one['gold']:.2f}"]
            ends = [f"{one['response_length']:.1f}", f"{one['missing_eos']:.0%}"]
            lines.append([str(one["step"]), *scores, *ends, f"{one['kl']:.1f}"])
        return markdown(lines)

    return table


def judged_rate(name: str) -> Section:
    """How often the judge prefers a response after P3O. name: of a record."""

    def share(records: Records) -> str:
        rate = records[name]["win_rate_by_judge"]
        return f"{rate['win_rate']:.0%} [{rate['low']:.0%}, {rate['high']:.0%}]"

    return share


def accuracies(name: str) -> Section:
    """Of the reward model and of what judges. name: of a record."""

    def shares(records: Records) -> str:
        return " and ".join(
            f"{one['accuracy']:.2f} [{one['accuracy_low']:.2f}, {one['accuracy_high']:.2f}]"
            for one in records[name]["reward_models"].values()
        )

    return shares


def human_kinds(records: Records) -> str:
    record = records["human_preferences.json"]
    kinds = record["reward_models"]["reward"], record["preference_model"]
    scores, comparisons = (
        f"{one['accuracy']:.2f} [{one['accuracy_low']:.2f}, {one['accuracy_high']:.2f}]"
        for one in kinds
    )
    return f"{scores} by scores and {comparisons} by comparisons"


def alpaca_eval(records: Records) -> str:
    """Reward models and preference models beside what reads no text, on held-out comparisons."""
    record = records["alpaca_eval.json"]
    lines = [["", "seeds", "accuracy", "where the shorter answer was chosen", "log loss"]]
    for name, one in (record["models"] | record["rivals"]).items():
        shorter = one["accuracy where the shorter answer was chosen"]
        loss = interval(one["log_loss"]) if "log_loss" in one else ""
        seeds = str(len(one["seeds"])) if "seeds" in one else ""
        lines.append([name, seeds, interval(one["accuracy"]), interval(shorter), loss])
    return markdown(lines)


def alpaca_eval_kinds(records: Records) -> str:
    """Accuracy by scores less accuracy by comparisons, on the same comparisons."""
    pair = records["alpaca_eval.json"]["paired"]["scores, soft less comparisons, soft"]
    return interval(pair["accuracy"])


def alpaca_eval_length(records: Records) -> str:
    """Accuracy of both kinds less that of the longer answer."""
    pairs = records["alpaca_eval.json"]["paired"]
    kinds = ("scores, soft", "comparisons, soft")
    return " and ".join(
        interval(pairs[f"{kind} less the longer answer"]["accuracy"]) for kind in kinds
    )


def interval(mean: dict[str, float]) -> str:
    return f"{mean['mean']:.2f} ± {mean['half']:.2f}"


def human_offsets(records: Records) -> str:
    offsets = records["human_preferences.json"]["offsets"]
    return " and ".join(
        f"{offsets[name]['offset']:.2f} beside {offsets[name]['within']:.2f}"
        for name in ("reward", "judge")
    )


def game(records: Records) -> str:
    """Means over seeds with their intervals."""
    lines = [["algorithm", "start", "40 updates", "80", "160", "160, likeliest guesses"]]
    for run in records["game.json"]["runs"]:
        found = [mean_and_interval(digits_found(run, updates)) for updates in ("40", "80", "160")]
        start = "" if len(lines) > 1 else f"{statistics.mean(digits_found(run, '0')):.3f}"
        greedy = statistics.mean(seed["greedy"]["160"] for seed in run["seeds"])
        lines.append(
            [GAME_NAMES.get(run["algorithm"], run["algorithm"]), start, *found, f"{greedy:.3f}"]
        )
    return markdown(lines)


def digits_found(run: dict, updates: str) -> list[float]:
    return [seed["found"][updates] for seed in run["seeds"]]


def game_lead(leader: str, other: str) -> Section:
    """After 80 updates, seed by seed."""

    def section(records: Records) -> str:
        runs = {run["algorithm"]: digits_found(run, "80") for run in records["game.json"]["runs"]}
        return mean_and_interval(
            [mine - theirs for mine, theirs in zip(runs[leader], runs[other], strict=True)]
        )

    return section
