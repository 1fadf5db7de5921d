"""Tables and figures of the ten languages, from made-up runs."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from benchmarks.frontier.report import __main__ as report
from benchmarks.frontier.report import equal_kl, measures, readme_plot, rewards, stale, verdicts
from benchmarks.frontier.report.measures import Study
from benchmarks.frontier.runs import rewards as rewards_of
from benchmarks.frontier.runs import stale as planned
from benchmarks.frontier.runs import tuned_arms
from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.runs.records import to_frames
from benchmarks.frontier.runs.tuned_arms import arm, selection_runs
from fastp3o.evaluation.matched_kl import Estimate

CORRECTIONS = {planned.label(*pair): "none" for pair in planned.COMPARED}
# What an algorithm loses to the best one, whose reward is √(2 KL).
BEHIND = {"ppo": 0.3, "rebel": 0.02, "separate": 0.1}
RATIOS_COST = 0.5


def record(run: Run) -> dict:
    noise = np.random.default_rng([run.seed, len(run.algorithm)]).normal(0, 0.01)
    behind = BEHIND.get(run.algorithm, 0.0) + RATIOS_COST * (run.correction == "ratios") + noise
    behind += abs(np.log(run.learning_rate / 6e-4)) / 10
    evaluations = []
    for step in (0, 2, 4, 7, 10, 14, 20):
        kl = 0.2 * step
        gain = ((2 * kl) ** 0.5 - behind) if step else 0.0
        evaluations.append({"step": step, "kl": kl, "reward": 5 + gain, "gold": 1 + gain / 2, "missing_eos": 0.0})
    return asdict(run) | {"sha256": "0", "seconds": 20.0, "evaluations": evaluations}


@pytest.fixture(scope="module")
def study() -> Study:
    arms = [one for lag in planned.LAGS for one in planned.at_lag(lag, CORRECTIONS)]
    rates = {one.name: 6e-4 for one in arms}
    runs = [run for one in arms for rate in (3e-4, 6e-4) for run in selection_runs(one, rate)]
    runs += [
        replace(one, task=task, seed=seed, learning_rate=6e-4) for one in arms for seed, task in tuned_arms.RESULTS
    ]
    chosen = {"rates": rates, "corrections": CORRECTIONS}
    return Study(to_frames(map(record, dict.fromkeys(runs))), chosen)


@pytest.fixture(scope="module")
def further() -> Study:
    """Runs of the other questions."""
    asked = [*rewards_of.scales(), *rewards_of.without_offset()]
    rates = {one.name: 6e-4 for one in asked}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned_arms, "chosen", lambda: {"rates": rates})
        runs = [*tuned_arms.results(asked), *rewards_of.offset_doses()]
    return Study(to_frames(map(record, dict.fromkeys(runs))), {"rates": rates})


EMPTY = Study(to_frames([]))


def test_an_arm_is_measured_on_the_languages_of_the_results(study):
    found = measures.measured(study, arm("ppo"))
    assert found.index.tolist() == list(range(8))
    last = record(replace(arm("ppo"), seed=3, learning_rate=6e-4))["evaluations"][-1]
    assert found.loc[3, "end"] == pytest.approx(last["reward"] - 5 - 0.1 * last["kl"])
    assert found["gain"].tolist() == pytest.approx(found["gold"] * 2)
    assert measures.measured(EMPTY, arm("ppo")).empty


def test_differences_are_over_languages(study):
    pair = arm("joint"), arm("ppo")
    estimate = measures.difference(study, pair, "end")
    assert estimate.mean == pytest.approx(0.3, abs=0.02)
    assert estimate.low < estimate.mean < estimate.high
    table = measures.differences(study, [pair])
    assert table[0][-2:] == ["reward − 0.1 KL", "gain at KL 1"]
    assert table[1][:2] == ["P3O, joint, K 4", "PPO, K 4"]
    assert table[1][2].startswith(("+0.3", "+0.29"))


def test_the_best_p3o_is_that_of_the_selection_languages(study):
    """Joint clipping and none are equally good as they were made, so either may be it."""
    assert {stale.best_p3o(study, lag, K).algorithm for lag in planned.LAGS for K in (4, 16)} <= {"joint", "none"}
    rivals = stale.rivals(study, 6, 4)
    assert {first.correction for first, _ in rivals} == {"none"}
    assert len(rivals) == 7
    assert stale.best_p3o(EMPTY, 6, 4) is None


def test_tables_and_figures_are_of_what_has_run(study, further, tmp_path):
    pair = stale.ratios("ppo", 0.0, 4), stale.tuned(study, "ppo", 0.0, 6, 4)
    assert measures.difference(study, pair, "end").mean == pytest.approx(-RATIOS_COST, abs=0.02)
    assert any(line[0] == "GSPO 0.03, K 16, 6 updates old, ratios" for line in report.tables(study)[1])
    assert all("nan" not in cell for table in report.tables(further) for line in table for cell in line)
    assert rewards.different_weights(further)[1:] == [
        [measures.name_of(arm(name)), "5", "1"] for name in ("joint", "rloo", "grpo", "ppo_centred")
    ]
    for made, draw in ((study, stale.figure), (further, rewards.scales_figure), (further, readme_plot.draw)):
        assert draw(made, tmp_path / "figure.svg")
        assert "<path" in (tmp_path / "figure.svg").read_text()
        assert not draw(EMPTY, tmp_path / "none.svg")


def test_equal_kl_compares_the_settings_that_were_chosen(tmp_path):
    best = replace(arm("joint"), learning_rate=6e-4, kl_coef=0.3)
    slow = replace(arm("ppo"), learning_rate=6e-4, updates=40)
    settings = {"joint": {"1": asdict(best), "2": asdict(best)}, "ppo": {"1": asdict(slow), "2": asdict(slow)}}
    runs = [replace(one, task=task, seed=seed) for one in (best, slow) for seed, task in tuned_arms.RESULTS]
    runs += [run for one in (best, slow) for run in selection_runs(one, one.learning_rate)]
    study = Study(to_frames(map(record, runs)), {"equal_kl": settings})
    rival, estimate = equal_kl.best_rival(study, 1.0)
    assert rival == "PPO"
    assert estimate.mean == pytest.approx(BEHIND["ppo"], abs=0.02)
    assert equal_kl.best_rival(EMPTY, 1.0) == ("", None)
    assert [line[:2] for line in equal_kl.differences(study)[1:]] == [["1", "PPO"], ["2", "PPO"]]
    assert equal_kl.figure(study, tmp_path / "equal_kl.svg")
    assert not equal_kl.figure(EMPTY, tmp_path / "none.svg")


@pytest.mark.parametrize(("reached", "rival"), [(4, "PPO"), (5, "GRPO")])
def test_a_rival_at_equal_kl_gets_there_on_most_languages(reached, rival):
    """GRPO is the better one, but only on some."""
    arms = {name: replace(arm(name), learning_rate=6e-4) for name in ("joint", "ppo", "grpo")}
    settings = {name: {"1": asdict(one)} for name, one in arms.items()}
    runs = [
        replace(one, task=task, seed=seed)
        for name, one in arms.items()
        for seed, task in tuned_arms.RESULTS[: reached if name == "grpo" else None]
    ]
    study = Study(to_frames(map(record, runs)), {"equal_kl": settings})
    assert equal_kl.best_rival(study, 1.0)[0] == rival


def test_verdicts_are_what_intervals_say(study):
    ahead, little, behind, open_ = (
        Estimate(mean, low, high, 8)
        for mean, low, high in ((0.3, 0.2, 0.4), (0.03, 0.01, 0.05), (-1, -2, -0.5), (0, -1, 1))
    )
    words = [verdicts.reading(one) for one in (ahead, little, behind, open_, None)]
    assert words[:3] == ["P3O is ahead", "P3O is ahead, by little", "P3O is behind"]
    assert words[3:] == ["no evidence of a difference", "not measured"]
    table = verdicts.table(study)
    assert len(table) <= 1 + 8
    stale_one = next(line for line in table if line[0].startswith("rollouts 6 updates old, 16"))
    assert "GSPO" in stale_one[2] or "GRPO" in stale_one[2] or "RLOO" in stale_one[2]
    assert {line[1] for line in verdicts.table(EMPTY)[1:]} == {"not measured"}
