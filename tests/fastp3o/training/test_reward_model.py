"""Reward models: rankings, margins, centring, adapters and top layers, against the formulas written a second time."""

import json
import random
from itertools import combinations
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fastp3o.data.loading import load_rankings
from fastp3o.models.loading import load_reward_model
from fastp3o.models.packed_model import scores
from fastp3o.packing.pack import Packing, pack
from fastp3o.training import reward_model
from fastp3o.training.reward_model import RewardModelConfig, RewardModelling, bradley_terry
from tests.fastp3o.runs import assert_equal, metrics

LIMITS = {"max_prompt_tokens": 64, "max_response_tokens": 32}


@pytest.fixture
def data(workplace: Path) -> Path:
    """Rankings of two to five, and preferences with and without a margin."""
    drawn = random.Random(0)
    words = ["tree", "house", "river", "cloud", "stone", "apple", "eagle", "ocean"]
    ranked = [
        {"prompt": f"Say {word}:", "ranked_responses": [f" {word}", *(" z" * n for n in range(1, drawn.randint(2, 5)))]}
        for word in words
    ]
    pairs = [
        {"prompt": f"Say {w} please:", "chosen": f" {w}", "rejected": " zzz", "margin": m}
        for w, m in zip(words, (1, 0.5, None, 0, 2, 1, 3.5, 0), strict=True)
    ]
    for name, records in (("ranked", ranked), ("margins", pairs)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return workplace


@pytest.fixture
def judge(tiny_model: str, data: Path) -> str:
    """A reward model whose scores differ."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained("judge")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained("judge")
    return "judge"


def config(model: str, output_dir: str, train_data: str = "ranked.jsonl", **changes) -> RewardModelConfig:
    settings = {
        "train_data": train_data,
        "epochs": 12,
        "batch_size": 8,
        "learning_rate": 1e-2,
        "report_to": "none",
        "precision": "fp32",
        **LIMITS,
    }
    return RewardModelConfig(**(settings | {"model": model, "output_dir": output_dir} | changes))


def oracle(ranked_scores: list[list[torch.Tensor]], margins: list[float], centring: float) -> dict[str, torch.Tensor]:
    """One pair at a time, in fp64: sums over prompts of means over their pairs."""
    totals = {"loss": 0.0, "accuracy": 0.0, "margin": 0.0}
    for prompt_scores, m in zip(ranked_scores, margins, strict=True):
        pairs = list(combinations([score.double() for score in prompt_scores], 2))
        for w, l in pairs:  # noqa: E741
            loss = -torch.log(1 / (1 + torch.exp(-(w - l - m)))) + centring * (w + l) ** 2
            totals["loss"] = totals["loss"] + loss / len(pairs)
            totals["accuracy"] += float(w > l) / len(pairs)
            totals["margin"] = totals["margin"] + (w - l) / len(pairs)
    return totals


@pytest.mark.parametrize("tokens_per_row", [8192, 30])
@pytest.mark.parametrize("centring", [0.0, 0.3])
def test_the_loss_is_the_mean_over_a_rankings_pairs(judge, tokenizer, tokens_per_row, centring):
    """The loss of the scores that transformers gives each response by itself."""
    examples, _ = load_rankings("ranked.jsonl,margins.jsonl", tokenizer, **LIMITS)
    assert len(examples) == 16
    task = RewardModelling(config(judge, "run", centring=centring, tokens_per_row=tokens_per_row))
    model = load_reward_model(judge)
    rows = task.pack(examples[:])
    responses = sum(map(len, examples["ranked_ids"]))
    # Every response once, every prompt once.
    assert sum(len(row.ends_at) for row in rows) == responses > 3 * 8
    once = sum(map(len, examples["prompt_ids"])) + sum(len(ids) for ranked in examples["ranked_ids"] for ids in ranked)
    assert sum(row.tokens for row in rows) == once
    sums: dict[str, torch.Tensor] = {}
    for row in rows:
        loss, metrics = task.loss(model, row, 1.0)
        for name, value in {"loss": loss, **{name: total for name, (total, _) in metrics.items()}}.items():
            sums[name] = sums.get(name, 0) + value
    assert sum(map(task.count, rows)) == 16
    alone = AutoModelForSequenceClassification.from_pretrained(judge).eval()
    with torch.no_grad():
        ranked_scores = [
            [alone(torch.tensor([prompt + ids]), use_cache=False).logits[0, 0] for ids in ranked]
            for prompt, ranked in zip(examples["prompt_ids"], examples["ranked_ids"], strict=True)
        ]
    expected = oracle(ranked_scores, examples["margin"], centring)
    for name, value in expected.items():
        assert sums[name].item() == pytest.approx(float(value), rel=1e-4), name
    assert ("centre" in sums) == bool(centring)


def test_the_gradient_is_that_of_the_formula():
    torch.manual_seed(0)
    values = torch.randn(4, dtype=torch.float64, requires_grad=True)
    better, worse = torch.triu_indices(4, 4, offset=1)
    for margin, centring in ((0.0, 0.0), (0.7, 0.0), (0.0, 0.2), (0.7, 0.2)):
        sums = bradley_terry(values[better], values[worse], 1 / 6, margins=margin, centring=centring)
        expected = oracle([list(values)], [margin], centring)["loss"]
        torch.testing.assert_close(sums["loss"], expected)
        torch.testing.assert_close(*(torch.autograd.grad(loss, values)[0] for loss in (sums["loss"], expected)))


def test_a_preference_is_a_ranking_of_two_to_the_bit(data, tiny_model):
    pairs = [json.loads(line) for line in Path("preferences.jsonl").read_text().splitlines()]
    ranked = [{"prompt": pair["prompt"], "ranked_responses": [pair["chosen"], pair["rejected"]]} for pair in pairs]
    Path("two.jsonl").write_text("".join(json.dumps(record) + "\n" for record in ranked))
    for name in ("preferences", "two"):
        reward_model.train(config(tiny_model, name, f"{name}.jsonl", epochs=2, eval_data=f"{name}.jsonl"))
    assert metrics("preferences") == metrics("two")
    assert metrics("preferences", "eval.jsonl") == metrics("two", "eval.jsonl")
    assert_equal(trained("preferences"), trained("two"))


def trained(run: str) -> dict[str, torch.Tensor]:
    return AutoModelForSequenceClassification.from_pretrained(f"{run}/model").state_dict()


@pytest.mark.parametrize(
    ("settings", "trains"),
    [
        ({"lora_rank": 4}, "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj score"),
        ({"trainable_layers": 1}, "layers.1. model.norm score"),
    ],
)
def test_parts_of_a_model_learn_rankings_and_the_head_with_them(data, tiny_model, settings, trains):
    reward_model.train(config(tiny_model, "run", eval_data="ranked.jsonl", epochs=40, **settings))
    before, after = metrics("run", "eval.jsonl")
    assert before["accuracy"] == pytest.approx(0.5)
    assert after["accuracy"] > 0.9
    start = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).state_dict()
    start["score.weight"].zero_()
    changed = {name for name, weight in trained("run").items() if not torch.equal(weight, start[name])}
    assert changed == {name for name in start if any(part in name for part in trains.split())}


def test_merged_adapters_score_as_they_did_in_training(data, tiny_model, tokenizer, monkeypatch):
    models = []
    load = RewardModelling.load_model

    def recorded(*arguments, **options):
        models.append(load(*arguments, **options))
        return models[-1]

    monkeypatch.setattr(RewardModelling, "load_model", staticmethod(recorded))
    reward_model.train(config(tiny_model, "run", lora_rank=4))
    examples, _ = load_rankings("ranked.jsonl", tokenizer, **LIMITS)
    (row,) = pack(examples["prompt_ids"], examples["ranked_ids"], Packing(8192))
    merged = load_reward_model("run/model")
    assert not any("lora" in name for name, _ in merged.named_parameters())
    with torch.no_grad():
        torch.testing.assert_close(scores(merged, row), scores(models[0], row), rtol=1e-4, atol=1e-4)


def test_margins_push_scores_apart_and_centring_draws_them_to_zero(data, tiny_model):
    plain = [json.loads(line) for line in Path("preferences.jsonl").read_text().splitlines()]
    for name, m in (("none", {}), ("wide", {"margin": 4})):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(record | m) + "\n" for record in plain))
        reward_model.train(config(tiny_model, name, f"{name}.jsonl", epochs=20))
    assert metrics("wide")[-1]["margin"] > metrics("none")[-1]["margin"] + 2
    for coefficient in (0.001, 10.0):
        reward_model.train(config(tiny_model, f"c{coefficient}", centring=coefficient, epochs=20))
    assert abs(metrics("c10.0")[-1]["centre"]) < abs(metrics("c0.001")[-1]["centre"])


def test_an_evaluation_has_an_interval_and_a_plot(data, tiny_model):
    reward_model.train(config(tiny_model, "run", "ranked.jsonl,preferences.jsonl", eval_data="ranked.jsonl"))
    for line in metrics("run", "eval.jsonl"):
        assert line["accuracy_low"] <= line["accuracy"] + 1e-6 <= line["accuracy_high"] + 2e-6
        assert 0 <= line["calibration_error"] <= 0.5
    assert Path("run/calibration.png").stat().st_size > 10_000
    assert metrics("run")[-1]["epoch"] == 12  # of 16 examples of both files


def test_a_resumed_run_with_adapters_is_the_uninterrupted_one(data, tiny_model, monkeypatch):
    settings = {"lora_rank": 2, "epochs": 5, "eval_data": "margins.jsonl", "centring": 0.1}
    reward_model.train(config(tiny_model, "whole", **settings))
    calls, score = [], reward_model.scores

    def breaks_off(model, row):
        calls.append(None)
        if len(calls) == 4:  # an evaluation and two steps, of one row each, are over
            raise KeyboardInterrupt
        return score(model, row)

    monkeypatch.setattr(reward_model, "scores", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        reward_model.train(config(tiny_model, "resumed", save_every=1, **settings))
    monkeypatch.setattr(reward_model, "scores", score)
    assert len(metrics("resumed")) == 2
    reward_model.train(config(tiny_model, "resumed", save_every=1, resume=True, **settings))
    assert metrics("resumed") == metrics("whole")
    assert metrics("resumed", "eval.jsonl") == metrics("whole", "eval.jsonl")
    assert_equal(trained("resumed"), trained("whole"))
