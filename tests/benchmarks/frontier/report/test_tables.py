import hashlib
import json
import math
from dataclasses import asdict

import matplotlib.image
import numpy as np
import pytest

from benchmarks.frontier import (
    acceptance,
    cells,
    comparisons,
    endpoints,
    every_run,
    figures,
    learning_rates,
    plan,
    records,
    sanity,
    tables,
)
from benchmarks.frontier.plan import Run
from benchmarks.frontier.records import Arm, Study

RATES = {name: {"joint": 3e-4, "separate": 3e-4, "none": 3e-4, "ppo": 1.5e-4, "dpo": 6e-4} for name in plan.GROUPS}
UPDATES = (0, 1, 2, 3, 5, 7, 10, 14, 20, 28, 40)


def best(kl):
    return 1.4 * kl**0.5


def record(run: Run) -> dict:
    """A made-up run: clippings alike, PPO much worse under an unlearnable offset, KL by learning rate and algorithm."""
    of_seed = np.random.default_rng([run.seed, 7])
    noise = np.random.default_rng(int(hashlib.sha256(run.name.encode()).hexdigest()[:8], 16))
    speed = 5 * (run.learning_rate / 3e-4) ** 0.8 * (0.03 / run.kl_coef) ** 0.25 * of_seed.uniform(0.9, 1.15)
    speed *= {"none": 1.6, "ppo": 1.5, "dpo": 1.2}.get(run.algorithm, 1.0)
    speed *= 0.35 if run.algorithm == "joint-absolute" and run.offset != "none" else 1.0
    speed *= 0.1 if run.task == plan.DOCSTRINGS else 1.0
    efficiency = of_seed.normal(0.75, 0.02) - 0.02 * math.log(run.learning_rate / 1.5e-4)
    offset_harm = {"none": 0.0, "learnable": 0.05, "unlearnable": 0.5}[run.offset] if run.algorithm == "ppo" else 0.0
    seen = plan.replace(run, offset="none", offset_sd=0.0) if run.algorithm in endpoints.CLIPPINGS else run
    evaluations = []
    for step in UPDATES:
        kl = max(0.0, speed * (1 - math.exp(-step / 15)) + (speed * noise.normal(0, 0.006) if step else 0))
        gain = (efficiency - offset_harm) * best(kl) + (noise.normal(0, 0.02) if step else 0)
        evaluation = {"step": step, "reward": 10.0 + gain, "reward_std": 1.0 + run.offset_sd, "kl": kl, "kl_std": 1.0}
        evaluation |= {"response_length": 20.0, "missing_eos": 0.001, "prompts": 128}
        if run.task != plan.DOCSTRINGS:
            evaluation |= {"gold": 3 + 0.8 * gain, "gold_std": 1.0}
        evaluations.append(evaluation)
    weights = hashlib.sha256(seen.name.encode()).hexdigest()
    return asdict(run) | {"sha256": weights, "seconds": 25.0, "evaluations": evaluations}


@pytest.fixture(scope="module")
def study():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "settings", lambda: RATES)
        runs = dict.fromkeys(run for part in plan.PARTS.values() for group in plan.GROUPS for run in part(group))
    return Study([record(run) for run in runs], RATES)


@pytest.fixture(scope="module")
def optimum(study):
    curve = [{"kl": kl, "reward_gain": best(kl), "ess": 500 / math.exp(kl / 2)} for kl in np.linspace(0.1, 8, 80)]
    return dict.fromkeys({run["task"] for run in study.runs}, curve)


EMPTY = Study([], {})


def without(study: Study, **dropped) -> Study:
    runs = [run for run in study.runs if any(run[key] != value for key, value in dropped.items())]
    return study._replace(runs=runs)


def changed(study: Study, change, **wanted) -> Study:
    """Evaluations of the wanted runs, each replaced by what `change` makes of it."""
    runs = []
    for run in study.runs:
        if all(run[key] == value for key, value in wanted.items()):
            run = run | {"evaluations": [evaluation | change(evaluation) for evaluation in run["evaluations"]]}
        runs.append(run)
    return study._replace(runs=runs)


def verdict(study, optimum, number):
    return acceptance.verdicts(study, optimum)[number].verdict


def test_runs_and_rates_are_read_and_a_run_recorded_twice_is_refused(study, tmp_path):
    assert records.load(tmp_path, tmp_path / "settings.json") == EMPTY
    (tmp_path / "settings.json").write_text(json.dumps(RATES))
    lines = [json.dumps(run) + "\n" for run in study.runs[:3]]
    (tmp_path / "runs.jsonl").write_text("".join(lines))
    assert records.load(tmp_path, tmp_path / "settings.json") == Study(study.runs[:3], RATES)
    (tmp_path / "runs.jsonl").write_text("".join(lines + lines[:1]))
    with pytest.raises(ValueError, match="two runs"):
        records.load(tmp_path, tmp_path / "settings.json")


def test_seeds_that_chose_the_learning_rate_are_in_no_arm_of_the_results(study):
    for group in plan.GROUPS:
        for arm in comparisons.MAIN:
            assert {run["seed"] for run in study.runs_of(group, arm)} <= set(plan.SEEDS)
    chosen = study.runs_of("languages", Arm("ppo"))
    assert len(chosen) == len(plan.SEEDS)
    assert {(run["learning_rate"], run["offset"], run["kl_coef"]) for run in chosen} == {(1.5e-4, "none", 0.03)}
    tried = study.runs_of("languages", Arm("ppo", learning_rate=6e-4), selection=True)
    assert {run["seed"] for run in tried} == set(plan.SELECTION_SEEDS["languages"])


def test_every_arm_of_the_plan_is_in_a_table_with_its_gains(study):
    rows = comparisons.levels(study, "languages")
    assert rows[0][-3:] == ["at KL 1", "at KL 2", "at KL 4"]
    assert len(rows) == 1 + 2 * len(comparisons.MAIN)
    assert not any(cells.NOT_MEASURED in row for row in rows)
    joint = next(row for row in rows if row[:3] == ["joint", "3e-4", "none"] and row[5] == "proxy")
    assert joint[-1].endswith("(8)")
    assert float(joint[-1][:4]) == pytest.approx(0.736 * best(4), abs=0.1)


def test_differences_are_paired_and_corrected_for_all_in_the_table(study):
    rows, count = comparisons.differences(study, "languages")
    assert count == sum(cell.endswith(")") for row in rows[1:] for cell in row[2:])
    drop = comparisons.Comparison("", Arm("ppo", "unlearnable"), Arm("ppo"))
    alone = comparisons.difference(study, "languages", drop, 2.0, "reward")
    corrected = comparisons.difference(study, "languages", drop, 2.0, "reward", count)
    assert alone.mean == pytest.approx(-0.5 * best(2), abs=0.05)
    assert corrected.low < alone.low < alone.high < corrected.high < 0
    assert cells.estimate(corrected, signed=True) in [cell for row in rows for cell in row]


def test_docstrings_are_compared_only_where_most_seeds_of_every_algorithm_are(study):
    assert comparisons.matched_kls(study, plan.DOCSTRINGS) == (0.1, 0.2)
    assert comparisons.matched_kls(EMPTY, plan.DOCSTRINGS) == ()


def test_learning_rates_tell_selection_from_results(study):
    rows = learning_rates.table(study, "languages")
    of_results = ["7.5e-5", "**1.5e-4**", "3e-4"]
    assert [row[1] for row in rows if row[0] == "ppo"] == [*of_results, "6e-4", "1.2e-3", *of_results]
    assert {row[2]: row[3] for row in rows if row[:2] == ["ppo", "3e-4"]} == {"selection": "2", "results": "8"}
    spreads = learning_rates.spreads(study, "languages")
    assert spreads[0] == ["KL", *plan.ALGORITHMS, "algorithms"]
    assert all(float(cell) > 0 for cell in spreads[1][1:])


def test_ends_of_runs(study):
    none, joint = (
        next(row for row in endpoints.clipping(study, "languages") if row[0] == n) for n in ("none", "joint")
    )
    assert len(none[1].split(", ")) == 8
    assert float(none[2].split()[0]) > 1.3 * float(joint[2].split()[0])
    final = {tuple(row[:2]): float(row[2].split()[0]) for row in endpoints.scaling(study, "languages")[1:]}
    assert final["joint-absolute", "unlearnable"] < 0.5 * final["joint", "unlearnable"]
    swept = endpoints.sweep(study, plan.DOCSTRINGS)
    assert swept[0][2:] == ["final KL", "final gain, proxy", "gain at KL 0.1", "gain at KL 0.2"], "no gold utility"
    assert [row[1] for row in swept if row[0] == "dpo"] == ["0.1", "0.3", "1"]
    assert all("[" in row[1] for row in endpoints.lines(study, "languages")[1:])


def test_every_run_is_listed(study):
    rows = every_run.table(study.runs)
    assert len(rows) == 1 + len(study.runs)
    assert all(len(row) == len(rows[0]) for row in rows)


def test_made_up_runs_pass_as_they_were_made(study, optimum):
    assert [v.verdict for v in acceptance.verdicts(study, optimum)] == [
        "pass",
        "not measured",  # too few of PPO's seeds reach KL 4
        "not measured",
        "pass",
        "fail",  # clipping makes no difference at matched KL
        "pass",
        "pass",
    ]
    far = changed(study, lambda e: {"kl": 2 * e["kl"]}, algorithm="ppo")
    assert verdict(far, optimum, 1) == "pass"
    assert verdict(far, optimum, 2) == "pass"
    gained = changed(
        study,
        lambda e: {"reward": e["reward"] + 0.2 * e["kl"]},
        algorithm="joint",
        learning_rate=plan.HIGH_LEARNING_RATE,
    )
    assert verdict(gained, optimum, 4) == "pass"


def test_each_rule_can_fail(study, optimum):
    other = [run | {"sha256": "0"} if run["algorithm"] == "none" and run["seed"] == 0 else run for run in study.runs]
    for run in other:
        if run["sha256"] == "0" and run["offset"] != "none":
            run["sha256"] = "1"
    assert verdict(study._replace(runs=other), optimum, 0) == "fail"
    worse = changed(study, lambda e: {"reward": e["reward"] - 0.2 * e["kl"]}, algorithm="joint")
    assert verdict(worse, optimum, 3) == "fail"
    few = study._replace(runs=[run for run in study.runs if run["seed"] in plan.SEEDS])
    assert verdict(few, optimum, 3) == "not measured"
    faster = changed(study, lambda e: {"kl": 2 * e["kl"]}, algorithm="joint", learning_rate=plan.HIGH_LEARNING_RATE)
    assert verdict(faster, optimum, 4) == "fail"
    assert verdict(changed(study, lambda e: {"missing_eos": 0.03}, algorithm="dpo"), optimum, 6) == "fail"


def test_an_evaluation_above_the_optimum_is_named(study, optimum):
    compared, above = sanity.above_optimum(study.runs, optimum)
    assert compared > 1000
    assert above == []
    lucky = next(run for run in study.runs if run["offset"] == "unlearnable" and run["algorithm"] == "joint")
    better = [e | {"reward": e["reward"] + (e["step"] == 3) * 2.0} for e in lucky["evaluations"]]
    runs = [run | {"evaluations": better} if run is lucky else run for run in study.runs]
    _, above = sanity.above_optimum(runs, optimum)
    assert [(excess.run, excess.step) for excess in above] == [(records.name_of(lucky), 3)]
    assert above[0].errors > 10, "the offset's spread is no error of a gain"
    assert verdict(study._replace(runs=runs), optimum, 5) == "fail"
    assert sanity.above_optimum(runs, {}) == (0, [])
    uncertain = {task: [point | {"ess": 29.0} for point in points] for task, points in optimum.items()}
    assert sanity.above_optimum(runs, uncertain) == (0, [])


def test_nothing_is_invented_where_nothing_was_measured(optimum):
    assert {v.verdict for v in acceptance.verdicts(EMPTY, optimum)} == {"not measured"}
    text = tables.sections(EMPTY, {})
    assert "[" not in text.replace("[95%", "")
    assert "not measured" in text


def test_missing_arms_leave_the_others(study, optimum):
    for dropped in ({"algorithm": "dpo"}, {"offset": "unlearnable"}, {"task": "docstrings"}, {"seed": 3}):
        text = tables.sections(without(study, **dropped), optimum)
        assert "(7)" in text if "seed" in dropped else "not measured" in text


def test_numbers_are_short_and_plain():
    assert [cells.rate(value) for value in (3e-4, 1.5e-4, 3.75e-5)] == ["3e-4", "1.5e-4", "3.75e-5"]
    assert [cells.number(-0.001, signed=True), cells.number(-1.5)] == ["+0.00", "−1.50"]
    assert cells.level({("a", 0): None}) == cells.NOT_REACHED
    assert cells.level({}) == cells.NOT_MEASURED
    assert cells.level({("a", 0): 1.0, ("a", 1): 2.0}) == "1.50 (2)"


def test_figures_are_drawn_from_what_there_is(study, optimum, tmp_path):
    path = tmp_path / "figure.png"
    rates = [
        {
            "task": "docstrings",
            "first": "joint",
            "second": "sft",
            "by": "reward",
            "equal_kl": equal_kl,
            "win_rate": 0.7,
            "first_kl": 2.0,
            "second_kl": 0.0,
        }
        for equal_kl in (None, 4.0)
    ]
    drawn = [
        figures.frontier(study, optimum, "languages", path),
        figures.frontier(without(study, algorithm="ppo"), {}, plan.DOCSTRINGS, path),
        figures.sweep(study, path),
        figures.clipping(study, path),
        figures.learning_rates(study, path),
        figures.win_rates([rate | {"low": 0.6, "high": 0.8} for rate in rates], path),
    ]
    assert all(drawn)
    assert matplotlib.image.imread(path).std() > 0
    assert not figures.frontier(EMPTY, optimum, "languages", path)
    assert not any(draw(EMPTY, path) for draw in (figures.sweep, figures.clipping, figures.learning_rates))
    assert not figures.win_rates([], path)


def test_the_committed_tables_are_those_of_the_committed_runs():
    study = records.load()
    optimum = json.loads(records.read(records.RESULTS / "optimum.json"))
    assert tables.sections(study, optimum) in tables.README.read_text()
    assert tables.ALL_RUNS.read_text().count("\n| ") == len(study.runs) + 2
