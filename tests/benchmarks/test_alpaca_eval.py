"""Judges of held-out comparisons: accuracies with intervals over instructions, log losses by soft
labels, and rivals that read no text.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.alpaca_eval import HeldOut, compared, length_slope, mcnemar, paired, rivals, winner
from fastp3o.evaluation.calibration import judged


def comparisons(number: int, seed: int = 0, instructions: int | None = None) -> list[dict]:
    generator = np.random.default_rng(seed)
    return [
        {
            "prompt": f"instruction {place % (instructions or number)}",
            "chosen": "x" * int(generator.integers(1, 50)),
            "rejected": "x" * int(generator.integers(1, 50)),
            "probability": float(generator.uniform(0.5, 1)),
            "judge": ["alpaca_eval_gpt4", "weighted_alpaca_eval_gpt4_turbo"][place % 2],
            "chosen_model": "ABC"[int(generator.integers(3))],
            "rejected_model": "baseline",
        }
        for place in range(number)
    ]


def odds(number: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=number)


def test_with_one_comparison_an_instruction_the_interval_is_that_of_evaluations():
    records = comparisons(60)
    held_out, log_odds = HeldOut(records), odds(60)
    pairs = [(n, one, records[n]["probability"]) for n, one in enumerate(log_odds.tolist())]
    expected = judged(pairs, range(60))
    found = held_out.interval(held_out.right(log_odds))
    low, high = found["mean"] - found["half"], found["mean"] + found["half"]
    ends = expected["accuracy_low"], expected["accuracy_high"]
    assert (low, high) == pytest.approx(ends, abs=2e-3)


def test_copies_of_a_comparison_leave_the_interval_as_it_was():
    records, log_odds = comparisons(40), odds(40)
    alone, copied = HeldOut(records), HeldOut(records * 3)
    once = alone.interval(alone.right(log_odds))
    assert copied.interval(copied.right(np.tile(log_odds, 3))) == once


def test_the_log_loss_is_the_cross_entropy_of_soft_labels():
    held_out, log_odds = HeldOut(comparisons(30)), odds(30)
    expected = F.binary_cross_entropy_with_logits(
        torch.tensor(log_odds), torch.tensor(held_out.probability), reduction="none"
    )
    np.testing.assert_allclose(held_out.log_loss(log_odds), expected, rtol=1e-12)


def test_a_judge_beside_itself_has_no_difference_and_one_that_turns_around_has_all():
    held_out, log_odds = HeldOut(comparisons(50, instructions=20)), odds(50)
    same = paired(held_out, [log_odds], [log_odds])
    assert same["accuracy"] == {"mean": 0.0, "half": 0.0}
    assert same["by seed"] == [{"only one is right": [0, 0], "p": 1.0}]
    turned = paired(held_out, [log_odds], [-log_odds])
    right = int((log_odds > 0).sum())
    assert turned["by seed"][0]["only one is right"] == [right, 50 - right]


@pytest.mark.parametrize(("split", "p"), [((5, 5), 1.0), ((0, 5), 1 / 16), ((2, 8), 112 / 1024)])
def test_mcnemars_p_is_that_of_a_fair_coin(split, p):
    assert mcnemar(*split) == mcnemar(*split[::-1]) == pytest.approx(p)


def test_the_slope_of_lengths_has_the_least_cross_entropy():
    lengths, labels = odds(200, 2), np.random.default_rng(3).uniform(0.5, 1, size=200)
    slope = length_slope(lengths, labels)

    def loss(slope: float) -> float:
        logits = torch.tensor(slope * lengths)
        return F.binary_cross_entropy_with_logits(logits, torch.tensor(labels)).item()

    assert loss(slope) < min(loss(slope - 0.01), loss(slope + 0.01))


def test_rivals_take_the_longer_answer_and_the_model_that_won_more():
    trained_on = [
        {"chosen_model": "A", "rejected_model": "baseline", "probability": 0.9},
        {"chosen_model": "baseline", "rejected_model": "B", "probability": 0.8},
    ]
    asked = [
        {"chosen_model": "A", "rejected_model": "baseline"},  # won 0.9, and 0.1 and 0.8
        {"chosen_model": "B", "rejected_model": "baseline"},
        {"chosen_model": "unseen", "rejected_model": "baseline"},
    ]
    np.testing.assert_allclose(winner(asked, trained_on), [0.45, -0.25, 0.0])
    records = comparisons(40, instructions=30)
    found = rivals(HeldOut(records), comparisons(50, seed=5))
    longer = [len(one["chosen"]) > len(one["rejected"]) for one in records]
    equal = [len(one["chosen"]) == len(one["rejected"]) for one in records]
    shares = [
        0.5 if same else one["probability"] if ahead else 1 - one["probability"]
        for same, ahead, one in zip(equal, longer, records, strict=True)
    ]
    accuracy = found["the longer answer"]["accuracy"]["mean"]
    assert accuracy == pytest.approx(np.mean(shares), abs=1e-3)
    assert found["the judge itself"]["accuracy"]["mean"] >= accuracy


def test_kinds_are_compared_by_the_same_labels_and_labels_by_the_same_kind_on_shared_seeds():
    held_out = HeldOut(comparisons(30))
    names = ("scores, soft", "comparisons, soft", "scores, hard", "comparisons, hard")
    models = {
        name: {seed: {"log_odds": odds(30, 10 * place + seed).tolist()} for seed in seeds}
        for place, (name, seeds) in enumerate(zip(names, ((0, 1), (1, 2), (0,), (3,)), strict=True))
    }
    found = compared(held_out, models)
    assert {name: one["seeds"] for name, one in found.items() if "longer" not in name} == {
        "scores, soft less comparisons, soft": [1],
        "scores, soft less scores, hard": [0],
    }
    assert sum("longer" in name for name in found) == 4
    first, second = (held_out.right(np.array(models[name][1]["log_odds"])) for name in names[:2])
    difference = found["scores, soft less comparisons, soft"]["accuracy"]["mean"]
    assert difference == pytest.approx((first - second).mean(), abs=1e-3)
