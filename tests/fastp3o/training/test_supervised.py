"""Fine-tuning and reward modeling: their losses against plain ones, what trains, and losses that
are not finite.
"""

import json
from itertools import combinations
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from fastp3o.data.loading import load_rankings
from fastp3o.models.loading import load_reward_model
from fastp3o.training import reward_model, sft
from fastp3o.training.reward_model import RewardModelConfig, RewardModeling, bradley_terry
from fastp3o.training.sft import SFTConfig
from tests.fastp3o.runs import metrics, records

COMMON = {"max_response_tokens": 16, "epochs": 30, "batch_size": 8, "learning_rate": 1e-2}
COMMON |= {"report_to": "none", "precision": "fp32"}


def sft_config(tiny_model, output_dir, **changes):
    data = {"train_data": "sft.jsonl", "eval_data": "sft.jsonl"}
    return SFTConfig(**(COMMON | data | {"model": tiny_model, "output_dir": output_dir} | changes))


def reward_config(tiny_model, output_dir, **changes):
    data = {"train_data": "preferences.jsonl", "eval_data": "preferences.jsonl"}
    return RewardModelConfig(
        **(COMMON | data | {"model": tiny_model, "output_dir": output_dir} | changes)
    )


@pytest.mark.parametrize("train_on_prompt", [False, True])
def test_the_loss_is_a_mean_over_labeled_tokens_however_packed(
    workplace, tiny_model, tokenizer, train_on_prompt
):
    for name, size in (("whole", 8192), ("parts", 40)):
        changes = {"tokens_per_row": size, "epochs": 3, "train_on_prompt": train_on_prompt}
        sft.train(sft_config(tiny_model, name, **changes))
    for whole, parts in zip(metrics("whole"), metrics("parts"), strict=True):
        assert whole["loss"] == pytest.approx(parts["loss"], rel=1e-4)

    model, losses = AutoModelForCausalLM.from_pretrained(tiny_model), []
    for record in records("sft"):
        prompt, response = (
            tokenizer(record["prompt"]).input_ids,
            tokenizer(record["label"]).input_ids,
        )
        ids = torch.tensor([*prompt, *response, tokenizer.eos_token_id])
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])
        losses.append(-logprobs if train_on_prompt else -logprobs[len(prompt) - 1 :])
    assert metrics("whole", "eval.jsonl")[0]["loss"] == pytest.approx(
        torch.cat(losses).mean().item(), rel=1e-5
    )


LIMITS = {"max_prompt_tokens": 64, "max_response_tokens": 32}


@pytest.fixture
def data(workplace: Path) -> Path:
    """Rankings of two to five, and preferences with and without a margin."""
    ranked, pairs = [], []
    for number, (pair, margin) in enumerate(
        zip(records("preferences"), (1, 0.5, None, 0, 2, 1, 3.5, 0), strict=True)
    ):
        pairs.append(pair | {"prompt": f"{pair['prompt']} please", "margin": margin})
        worse = [" z" * n for n in range(1, 2 + number % 4)]
        ranked.append({"prompt": pair["prompt"], "ranked_responses": [pair["chosen"], *worse]})
    for name, lines in (("ranked", ranked), ("margins", pairs)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return workplace


def oracle(
    ranked_scores: list[list[torch.Tensor]], margins: list[float], centring: float
) -> dict[str, torch.Tensor]:
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
def test_the_loss_is_the_mean_over_a_rankings_pairs(
    data, tiny_model, tokenizer, tokens_per_row, centring
):
    """The loss of the scores that transformers gives each response by itself."""
    torch.manual_seed(0)
    alone = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).eval()
    torch.nn.init.normal_(alone.score.weight)
    alone.save_pretrained("judge")
    examples, _ = load_rankings("ranked.jsonl,margins.jsonl", tokenizer, **LIMITS)
    assert len(examples) == 16
    task = RewardModeling(
        reward_config("judge", "run", centring=centring, tokens_per_row=tokens_per_row)
    )
    model = load_reward_model("judge")
    rows = task.pack(examples[:])
    responses = sum(map(len, examples["ranked_ids"]))
    # Every response once, every prompt once.
    assert sum(len(row.ends_at) for row in rows) == responses > 3 * 8
    once = sum(map(len, examples["prompt_ids"])) + sum(
        len(ids) for ranked in examples["ranked_ids"] for ids in ranked
    )
    assert sum(row.tokens for row in rows) == once
    sums: dict[str, torch.Tensor] = {}
    for row in rows:
        loss, metrics = task.loss(model, row, 1.0)
        for name, value in {
            "loss": loss,
            **{name: total for name, (total, _) in metrics.items()},
        }.items():
            sums[name] = sums.get(name, 0) + value
    assert sum(map(task.count, rows)) == 16
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
        sums = bradley_terry(
            values[better], values[worse], 1 / 6, margins=margin, centring=centring
        )
        expected = oracle([list(values)], [margin], centring)["loss"]
        torch.testing.assert_close(sums["loss"], expected)
        torch.testing.assert_close(
            *(torch.autograd.grad(loss, values)[0] for loss in (sums["loss"], expected))
        )


@pytest.mark.parametrize(
    ("settings", "trains"),
    [
        ({"lora_rank": 4}, "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj score"),
        ({"trainable_layers": 1}, "layers.1. model.norm score"),
    ],
)
def test_parts_of_a_model_learn_rankings_and_the_head_with_them(data, tiny_model, settings, trains):
    changes = {"train_data": "ranked.jsonl", "eval_data": "ranked.jsonl", "epochs": 40} | settings
    reward_model.train(reward_config(tiny_model, "run", **changes))
    before, after = metrics("run", "eval.jsonl")
    assert before["accuracy"] == pytest.approx(0.5)
    assert after["accuracy"] > 0.9
    assert after["accuracy_low"] <= after["accuracy"] + 1e-6 <= after["accuracy_high"] + 2e-6
    start = AutoModelForSequenceClassification.from_pretrained(
        tiny_model, num_labels=1
    ).state_dict()
    start["score.weight"].zero_()
    trained = AutoModelForSequenceClassification.from_pretrained("run/model").state_dict()
    changed = {name for name, weight in trained.items() if not torch.equal(weight, start[name])}
    assert changed == {name for name in start if any(part in name for part in trains.split())}
