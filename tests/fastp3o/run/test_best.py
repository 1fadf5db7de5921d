"""The model of the best evaluation is kept, and a run ends early when none gets better."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fastp3o.errors import UserError
from fastp3o.evaluation.evaluate import Evaluation
from fastp3o.run.best import Best
from fastp3o.training import loop as online
from tests.fastp3o.runs import assert_equal, config, copy_at_save_before, metrics

SCORES = [0.0, 2.0, 5.0, 5.0, 3.0, 4.0, 9.0]


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations find SCORES, one after the other, whatever the policy says."""
    evaluate = Evaluation.__call__

    def scored(self: Evaluation) -> dict[str, float]:
        step = len(Path("run/eval.jsonl").read_text().splitlines()) if Path("run/eval.jsonl").exists() else 0
        return evaluate(self) | {"reward": SCORES[step]}

    monkeypatch.setattr(Evaluation, "__call__", scored)


def run(tiny_model: str, **changes) -> None:
    settings = {"updates": 6, "eval_prompts": "prompts.jsonl", "eval_every": 1, "keep_best": "reward"}
    online.train(config(tiny_model, "run", **settings | {"save_every": 1} | changes))


def best() -> dict:
    return json.loads(Path("run/best/evaluation.json").read_text())


def assert_best_is(step: int, metric: str = "reward") -> None:
    assert best()["step"] == step
    line = next(line for line in metrics("run", "eval.jsonl") if line["step"] == step)
    assert best()[metric] == line[metric]
    kept = load_file("run/best/model.safetensors")
    assert_equal(kept, load_file(f"run/checkpoint-{step:06}/model.safetensors"))
    assert AutoModelForCausalLM.from_pretrained("run/best").num_parameters() > 0


@pytest.fixture
def place(workplace: Path, scores: None) -> Path:
    return workplace


def test_early_stopping_ends_the_run_and_keeps_the_best(tiny_model, place, capsys):
    run(tiny_model, early_stopping=3)
    # 5 comes twice: an equal one is not better.
    assert [line["step"] for line in metrics("run")] == [1, 2, 3, 4, 5]
    assert_best_is(2)
    assert "--early_stopping: no evaluation since was better than reward 5 after step 2" in capsys.readouterr().out
    assert Path("run/model").exists()
    before = metrics("run")
    run(tiny_model, early_stopping=3, resume=True)
    assert metrics("run") == before
    run(tiny_model, early_stopping=0, resume=True)
    assert [line["step"] for line in metrics("run")] == [1, 2, 3, 4, 5, 6]
    assert_best_is(6)
    assert "best reward 9 after step 6: run/best" in capsys.readouterr().out


def test_a_resumed_run_keeps_the_best_of_an_unbroken_one(tiny_model, place):
    run(tiny_model, updates=3)
    copy_at_save_before("run", "copy")
    shutil.rmtree("run")
    Path("copy").rename("run")
    run(tiny_model, updates=3, resume=True)
    assert_best_is(2)
    run(tiny_model, updates=6, early_stopping=3, resume=True)
    assert [line["step"] for line in metrics("run")] == [1, 2, 3, 4, 5]
    assert_best_is(2)


def test_the_lowest_is_best_where_it_is_asked_for_and_a_metric_must_be_there(tiny_model, place):
    run(tiny_model, best_is="lowest", updates=2)
    assert best()["step"] == 0
    with pytest.raises(UserError, match="--keep_best accuracy: evaluations have reward, reward_std, kl, kl_std"):
        run(tiny_model, keep_best="accuracy", overwrite=True)


@pytest.mark.parametrize("lowest", [True, False])
def test_any_number_is_better_than_none_and_none_is_never_better(lowest):
    best = Best("reward/a", lowest=lowest, best=None, since=0)
    assert best.improves(1, {"reward/a": float("nan")})
    assert not best.improves(2, {"reward/a": float("nan")})
    assert best.since == 1
    assert best.improves(3, {"reward/a": 0.0})
    assert (best.best["step"], best.since) == (3, 0)
    assert not best.improves(4, {"reward/a": float("nan")})
