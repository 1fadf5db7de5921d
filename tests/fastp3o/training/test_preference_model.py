"""Preference models: their arithmetic beside fp64, their data, their files, and what they alone
learn.
"""

import json
import random
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fastp3o import train
from fastp3o.data.loading import load_preferences, load_prompts, load_rankings
from fastp3o.errors import UserError
from fastp3o.evaluation.circular import circular_share
from fastp3o.models.loading import load_policy, load_reward_model
from fastp3o.models.preference import leads_of_groups, log_odds, log_odds_of_groups
from fastp3o.models.tokenizer import load_tokenizer
from fastp3o.objectives.config.online import OBJECTIVES
from fastp3o.packing.pack import Packing
from fastp3o.rewards.reward import load_reward
from fastp3o.rollouts.groups import make_prompts
from fastp3o.rollouts.transformers_sampler import TransformersSampler
from fastp3o.training import reward_model
from fastp3o.training.config import RewardModelConfig
from fastp3o.training.reward_model import bradley_terry, comparison_sums
from tests.fastp3o.runs import assert_resumes, metrics, weights, weights_of_start
from tests.fastp3o.runs import config as online_config

LENGTHS = {"max_prompt_tokens": 64, "max_response_tokens": 16}


def config(tiny_model: str, output_dir: str, **changes) -> RewardModelConfig:
    settings = {
        "model": tiny_model,
        "output_dir": output_dir,
        "train_data": "preferences.jsonl",
        "batch_size": 8,
    }
    settings |= {
        "max_response_tokens": 16,
        "learning_rate": 1e-2,
        "report_to": "none",
        "precision": "fp32",
    }
    return RewardModelConfig(
        **(settings | {"eval_data": settings["train_data"], "preference_dim": 2} | changes)
    )


def write(name: str, records: list[dict]) -> str:
    Path(name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return name


# --- arithmetic -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4, 6, 14])
def test_the_form_is_that_of_the_matrix(size: int):
    torch.manual_seed(size)
    matrix = torch.block_diag(*[torch.tensor([[0.0, 1.0], [-1.0, 0.0]])] * (size // 2)).double()
    first, second = torch.randn(2, 50, size)
    expected = torch.einsum("ni,ij,nj->n", first.double(), matrix, second.double())
    torch.testing.assert_close(log_odds(first, second).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_odds(first.double(), second.double()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_swapped_responses_have_the_negative_to_the_bit(dtype: torch.dtype, scale: float):
    torch.manual_seed(1)
    for size, K in ((2, 2), (6, 5), (34, 13)):
        vectors = (scale * torch.randn(7, K, size)).to(dtype)
        a, b = vectors[:, 0], vectors[:, 1]
        assert torch.equal(log_odds(a, b), -log_odds(b, a))
        assert not log_odds(a, a).any()
        for tables in (log_odds_of_groups(vectors), leads_of_groups(vectors)):
            assert torch.equal(tables, -tables.mT)
        torch.testing.assert_close(log_odds_of_groups(vectors)[:, 0, 1], log_odds(a, b))
        if dtype == torch.float32 and scale <= 1:
            expected = log_odds_of_groups(vectors.double()).sigmoid() - 0.5
            torch.testing.assert_close(
                leads_of_groups(vectors).double(), expected, rtol=1e-4, atol=1e-6
            )


def test_bradley_terry_is_the_case_of_a_score_beside_a_constant():
    torch.manual_seed(2)
    scores, ones = torch.randn(2, 40), torch.ones(40)
    first, second = (torch.stack([score, ones], dim=1) for score in scores)
    assert torch.equal(log_odds(first, second), scores[0] - scores[1])


@pytest.mark.parametrize("largest", [1.0, 30.0, 1e4])
def test_the_loss_of_soft_labels_is_the_cross_entropy(largest: float):
    """One pair at a time, in fp64, from log(1 + exp) by its larger part: no probability is rounded
    to 0 or 1.
    """
    torch.manual_seed(3)
    z = (largest * torch.randn(64)).requires_grad_()
    p, weights = torch.rand(64), torch.rand(64)
    p[:8], p[8:16], p[16:24] = 1, 0.5, 0
    total, slopes = 0.0, []
    for odds, label, weight in zip(z.detach().double(), p.double(), weights.double(), strict=True):
        # log(1 + e^z); log(1 + e^-z) is z less
        softplus = max(odds, 0) + torch.log1p(torch.exp(-odds.abs()))
        total += weight * (label * (softplus - odds) + (1 - label) * softplus)
        slopes.append(weight * (odds.sigmoid() - label))
    sums = comparison_sums(z, weights, probabilities=p)
    assert sums["loss"].item() == pytest.approx(float(total), rel=1e-5)
    (slope,) = torch.autograd.grad(sums["loss"], z)
    torch.testing.assert_close(slope.double(), torch.stack(slopes), rtol=1e-4, atol=1e-6)
    assert torch.isfinite(slope).all()


def test_a_soft_label_counts_as_that_share_of_raters():
    """Three of four raters who prefer the first response are one label of ¾, in the loss and in
    each metric.
    """
    torch.manual_seed(4)
    first, second = torch.randn(2, 20)
    soft = bradley_terry(first, second, 1.0, probabilities=torch.tensor(0.75))
    votes = [bradley_terry(first, second, 0.75), bradley_terry(second, first, 0.25)]
    for name, value in soft.items():
        torch.testing.assert_close(value, votes[0][name] + votes[1][name])
    tie = bradley_terry(first, second, probabilities=torch.tensor(0.5))
    assert (tie["accuracy"], tie["margin"]) == (10, 0)


def test_circles_are_counted_among_decided_triples():
    draw = random.Random(5)
    tables, circles, triples = [], 0, 0
    for n in (2, 3, 5, 9):
        won = torch.zeros(n, n, dtype=torch.bool)
        for i, j in combinations(range(n), 2):
            if (lead := draw.choice((-1, 0, 1, 1))) != 0:
                won[(i, j) if lead > 0 else (j, i)] = True
        for a, b, c in combinations(range(n), 3):
            triples += all(won[x, y] or won[y, x] for x, y in ((a, b), (b, c), (a, c)))
            circles += any(
                won[x, y] and won[y, z] and won[z, x] for x, y, z in ((a, b, c), (a, c, b))
            )
        tables.append(won.numpy())
    assert triples > circles > 0
    assert circular_share(tables) == circles / triples
    assert circular_share(tables[:1]) is None


# --- data -----------------------------------------------------------------------------------------


def test_soft_labels_and_ties_are_data_of_the_reward_model_alone(workplace, tokenizer):
    pair = {"prompt": "Say tree:", "chosen": " tree", "rejected": " house"}
    source = write(
        "soft.jsonl", [pair | {"probability": value} for value in (0.5, 1, None, 0.125, 0)]
    )
    examples, _ = load_rankings(source, tokenizer, **LENGTHS)
    assert examples["probability"][:] == [0.5, 1.0, 1.0, 0.125, 0.0]
    for value in (1.5, -0.1, "0.5", True):
        with pytest.raises(UserError, match="field 'probability': expected a number from 0 to 1"):
            load_rankings(write("bad.jsonl", [pair | {"probability": value}]), tokenizer, **LENGTHS)
    both = write("both.jsonl", [pair | {"probability": 0.7, "margin": 1.0}])
    with pytest.raises(UserError, match="field 'margin': expected none beside a probability"):
        load_rankings(both, tokenizer, **LENGTHS)
    ranking = {"prompt": "Say tree:", "ranked_responses": [" a", " b"], "probability": 0.7}
    with pytest.raises(UserError, match="field 'probability': expected none in a ranking"):
        load_rankings(write("ranking.jsonl", [ranking]), tokenizer, **LENGTHS)
    with pytest.raises(
        UserError,
        match=r"record 1 field 'probability': expected more than 0.5: only the reward stage",
    ):
        load_preferences(source, tokenizer, **LENGTHS)
    certain = write("certain.jsonl", [pair | {"probability": 0.9}])
    assert len(load_preferences(certain, tokenizer, **LENGTHS)[0]) == 1
    assert len(load_prompts(source, tokenizer, max_prompt_tokens=64)[0]) == 5


# --- what is saved and loaded ---------------------------------------------------------------------


@pytest.fixture
def trained(workplace, tiny_model) -> str:
    """A preference model with vectors of 4, after a few steps."""
    reward_model.train(config(tiny_model, "run", preference_dim=4, epochs=2))
    return "run/model"


def test_all_preferences_begin_at_a_half_and_a_stopped_run_continues_with_the_same_bits(
    workplace, tiny_model
):
    reward_model.train(config(tiny_model, "run", epochs=6, save_every=3))
    before, after = metrics("run", "eval.jsonl")
    assert (before["accuracy"], before["margin"]) == (0.5, 0)
    assert before["loss"] == pytest.approx(0.6931472)
    assert after["accuracy"] > 0.9
    assert_resumes(config(tiny_model, "run", epochs=6, save_every=3))


def test_the_reward_is_what_transformers_gives_the_saved_model(trained, tiny_model):
    """One response at a time, beside packed rows of groups."""
    tokenizer = load_tokenizer(tiny_model)
    examples, _ = load_prompts("prompts.jsonl", tokenizer, max_prompt_tokens=64)
    sampler = TransformersSampler(
        load_policy(tiny_model), tokenizer, max_response_tokens=8, batch_size=8
    )
    groups = sampler(make_prompts(examples[:]), 3, 0)
    settings = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "packing": Packing(tokens_per_row=100),
    }
    reward = load_reward(trained, tokenizer, **settings)
    leads = reward.matrix(groups)
    assert leads.shape == (8, 3, 3)
    assert torch.equal(leads, -leads.mT)
    alone = AutoModelForSequenceClassification.from_pretrained(trained).eval()
    assert alone.config.num_labels == alone.config.fastp3o_preference_dim == 4
    with torch.no_grad():
        for group, table in zip(groups, leads, strict=True):
            vectors = [
                alone(torch.tensor([[*group.prompt.ids, *r.ids]])).logits[0]
                for r in group.responses
            ]
            for i, j in permutations(range(3), 2):
                a, b = vectors[i], vectors[j]
                form = a[0] * b[1] - a[1] * b[0] + a[2] * b[3] - a[3] * b[2]
                assert table[i, j].item() == pytest.approx(form.sigmoid().item() - 0.5, abs=1e-5)
    torch.testing.assert_close(reward(groups), leads.mean(2))


@pytest.mark.parametrize("objective", ["p3o", "nash_md", "grpo"])
def test_a_run_takes_a_preference_model_as_its_reward_and_resumes_with_the_same_bits(
    trained, tiny_model, objective
):
    """No score of a response alone is in the logs: row means over a prompt's responses have the
    mean 0.
    """
    changes = {
        "reward": trained,
        "responses_per_prompt": 4,
        "save_every": 2,
        "eval_prompts": "prompts.jsonl",
    }
    settings = online_config(tiny_model, "online", OBJECTIVES[objective], **changes)
    train(settings)
    assert all(update["reward"] == pytest.approx(0, abs=1e-6) for update in metrics("online"))
    assert all(update["reward_difference"] > 0 for update in metrics("online"))
    assert not torch.equal(
        weights("online")["model.norm.weight"], weights_of_start(tiny_model)["model.norm.weight"]
    )
    assert_resumes(settings)


def test_a_loaded_model_says_itself_that_it_compares(trained, tiny_model):
    settings = online_config(tiny_model, "named", reward=trained, updates=1)
    train(settings)
    loaded = AutoModelForSequenceClassification.from_pretrained(trained)
    train(replace(settings, output_dir="loaded", reward=""), reward=loaded)
    assert metrics("named") == metrics("loaded")


def test_models_of_another_kind_are_refused_with_the_remedy(trained, tiny_model, tmp_path):
    named = f"{trained} is a preference model with vectors of 4, and "
    with pytest.raises(
        UserError, match=named + "a score is needed here: --preference_dim 4 trains it further"
    ):
        load_reward_model(trained)
    with pytest.raises(UserError, match=named + "vectors of 2 are needed here"):
        reward_model.train(config(trained, "further"))
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).save_pretrained(
        "scores"
    )
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained("scores")
    with pytest.raises(
        UserError, match="scores has 1 outputs; --preference_dim begins with a language model"
    ):
        load_reward_model("scores", new_head=True, vector_size=4)
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=4).save_pretrained(
        "several"
    )
    with pytest.raises(
        UserError, match="several has 4 outputs; --preference_dim begins with a language model"
    ):
        load_reward_model("several", new_head=True, vector_size=4)
    reward_model.train(config(trained, "further", preference_dim=4))
    assert metrics("further", "eval.jsonl")[0]["loss"] == metrics("run", "eval.jsonl")[-1]["loss"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"preference_dim": 3},
            "--preference_dim must be even: vectors are made of blocks of 2, got 3",
        ),
        ({"preference_dim": -2}, "--preference_dim must be 0 or more, got -2"),
        (
            {"centring": 0.1},
            "--centring keeps scores around 0, and with --preference_dim responses have none",
        ),
        (
            {"lora_rank": 4, "lora_save": "adapter"},
            "--lora_save adapter cannot save a preference model",
        ),
    ],
)
def test_settings_that_a_preference_model_cannot_have_are_refused(tiny_model, changes, said):
    with pytest.raises(UserError, match=said):
        config(tiny_model, "run", **changes)


def test_an_adapter_trains_beside_the_vectors(workplace, tiny_model):
    reward_model.train(config(tiny_model, "run", lora_rank=4, epochs=30))
    assert metrics("run", "eval.jsonl")[-1]["accuracy"] > 0.9
    assert load_reward_model("run/model", vector_size=2).model.score.weight.shape == (2, 32)


# --- what they learn ------------------------------------------------------------------------------

BEATS = {"r": "s", "s": "p", "p": "r"}  # rock, scissors, paper


def circles(prompts: int, seed: int) -> list[dict]:
    """Pairs of three responses a prompt, whose first letters say which one wins; the letter behind
    says nothing.
    """
    draw, records = random.Random(seed), []
    for number in range(prompts):
        said = {kind: f" {kind}{draw.choice('abcdefghij')}" for kind in BEATS}
        for winner, loser in BEATS.items():
            records.append(
                {"prompt": f"{seed} {number}:", "chosen": said[winner], "rejected": said[loser]}
            )
    return records


def test_preferences_that_go_in_circles_are_learned_by_vectors_and_not_by_scores(
    workplace, tiny_model
):
    write("train.jsonl", circles(64, seed=1))
    write("held_out.jsonl", circles(16, seed=2))
    data = {
        "train_data": "train.jsonl",
        "eval_data": "held_out.jsonl",
        "epochs": 6,
        "batch_size": 16,
    }
    data["learning_rate"] = 1e-3
    reward_model.train(config(tiny_model, "vectors", **data))
    reward_model.train(config(tiny_model, "scores", preference_dim=0, **data))
    vectors, scores = metrics("vectors", "eval.jsonl")[-1], metrics("scores", "eval.jsonl")[-1]
    assert vectors["labeled_circular_triples"] == 1
    assert vectors["accuracy"] > 0.95
    assert vectors["circular_triples"] > 0.95
    # Of three pairs in a circle, an order of scores has two right at most.
    assert 1 / 3 <= scores["accuracy"] <= 2 / 3
    assert scores["loss"] > 0.65 > 0.3 > vectors["loss"]
