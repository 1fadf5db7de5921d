"""Reward − β KL at the end of runs. This is what training maximises; a gain at equal KL is only one side of it.

The reward is the proxy, in standard deviations, and β the KL coefficient. Online DPO is left out: its β weighs log-odds
of labels, so it is not the price of a nat in rewards.
"""

from pandas import Series

from benchmarks.frontier.report import cells
from benchmarks.frontier.report.questions import question_arm
from benchmarks.frontier.report.study import Arm, Study
from benchmarks.frontier.runs.plan import ALGORITHMS, BETA, EVERYONE
from benchmarks.frontier.tasks.groups import LANGUAGES, RETUNED
from fastp3o.evaluation.matched_kl import paired_difference

FIRST, WITHOUT = "joint", "dpo"
Compared = tuple[str, Arm]  # group, arm


def compared(study: Study) -> list[Compared]:
    """Every arm that ran with BETA: those of the first comparison, then the retuned ones with 2 and 4 responses."""
    arms = [(LANGUAGES, Arm(name, kl_coef=BETA)) for name in ALGORITHMS]
    for responses in (2, 4):
        chosen = [question_arm(study, name) for name in EVERYONE]
        arms += [(RETUNED, arm._replace(responses_per_prompt=responses)) for arm in chosen if arm]
    return [
        (group, arm)
        for group, arm in arms
        if arm.algorithm != WITHOUT and arm.kl_coef == BETA and len(study.runs_of(group, arm))
    ]


def at_the_end(study: Study, group: str, arm: Arm) -> Series:
    """By task and seed."""
    return study.runs_of(group, arm)["final_objective"]


def table(study: Study) -> list[list[str]]:
    """Header first."""
    header = ["group", "K", "algorithm", "learning rate", "seeds", "updates", "final KL"]
    lines = [[*header, f"reward − {BETA:g} KL"]]
    for group, arm in compared(study):
        runs = study.runs_of(group, arm)
        rate = arm.learning_rate or study.chosen_rate(group, arm.algorithm)
        about = [group, str(arm.responses_per_prompt), arm.algorithm, cells.rate(rate), str(len(runs))]
        values = [cells.mean(runs["final_kl"]), cells.mean(at_the_end(study, group, arm))]
        lines.append([*about, f"{runs['final_step'].max():g}", *values])
    return lines


def differences(study: Study) -> tuple[list[list[str]], int]:
    """Joint clipping against every other algorithm with as many responses. Header first, then the number of intervals
    that hold together.
    """
    values = {
        (group, arm.responses_per_prompt, arm.algorithm): at_the_end(study, group, arm).to_dict()
        for group, arm in compared(study)
    }
    pairs = {
        (group, str(responses), f"{FIRST} − {name}"): (first, second)
        for (group, responses, name), second in values.items()
        if name != FIRST and (first := values.get((group, responses, FIRST)))
    }

    def found(count: int) -> cells.Differences:
        return {label: [paired_difference(*pair, count)] for label, pair in pairs.items()}

    header = ["group", "K", "difference", f"reward − {BETA:g} KL"]
    return cells.difference_table(header, found)
