import json
from pathlib import Path

import pytest

from fastp3o.processes import NotFiniteError
from fastp3o.training import sft
from fastp3o.training.reward_model import RewardModelConfig
from fastp3o.training.sft import SFTConfig
from tests.fastp3o.runs import assert_equal, weights

COMMON = {
    "max_response_tokens": 16,
    "epochs": 30,
    "batch_size": 8,
    "learning_rate": 1e-2,
    "report_to": "none",
    "precision": "fp32",
}


def lines(folder: str, name: str) -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def sft_config(tiny_model, output_dir, **changes):
    data = {"train_data": "sft.jsonl", "eval_data": "sft.jsonl"}
    return SFTConfig(**(COMMON | data | {"model": tiny_model, "output_dir": output_dir} | changes))


def reward_config(tiny_model, output_dir, **changes):
    data = {"train_data": "preferences.jsonl", "eval_data": "preferences.jsonl"}
    return RewardModelConfig(**(COMMON | data | {"model": tiny_model, "output_dir": output_dir} | changes))


def test_learning_prompts_too_scores_their_tokens(workplace, tiny_model):
    sft.train(sft_config(tiny_model, "run", train_on_prompt=True))
    assert lines("run", "eval.jsonl")[-1]["loss"] < 1


def test_microbatches_do_not_matter(workplace, tiny_model):
    for name, size in (("whole", 8192), ("parts", 40)):
        sft.train(sft_config(tiny_model, name, tokens_per_row=size, epochs=3))
    for whole, parts in zip(lines("whole", "metrics.jsonl"), lines("parts", "metrics.jsonl"), strict=True):
        assert whole["loss"] == pytest.approx(parts["loss"], rel=1e-4)


def test_a_resumed_run_is_the_uninterrupted_one(workplace, tiny_model, monkeypatch):
    schedule = {"epochs": 4, "lr_schedule": "cosine"}
    sft.train(sft_config(tiny_model, "whole", **schedule))

    original, calls = sft.labelled_logprobs, []

    def breaks_off(model, batch):
        calls.append(None)
        if len(calls) == 4:  # an evaluation and two steps, of one row each, are over
            raise KeyboardInterrupt
        return original(model, batch)

    monkeypatch.setattr(sft, "labelled_logprobs", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        sft.train(sft_config(tiny_model, "resumed", save_every=1, **schedule))
    monkeypatch.setattr(sft, "labelled_logprobs", original)
    assert len(lines("resumed", "metrics.jsonl")) == 2
    sft.train(sft_config(tiny_model, "resumed", save_every=1, resume=True, **schedule))
    whole, resumed = (
        [(line["step"], line["loss"], line["grad_norm"]) for line in lines(run, "metrics.jsonl")]
        for run in ("whole", "resumed")
    )
    assert whole == resumed


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_loss_that_is_nan_leaves_the_step_before_it(workplace, tiny_model, monkeypatch, precision, at):
    """The next step has been launched by the time the host reads of it, if there is one."""
    settings = {"epochs": 4, "eval_data": None, "precision": precision}
    for folder, epochs in (("whole", 4), ("short", at - 1)):
        sft.train(sft_config(tiny_model, folder, **settings | {"epochs": epochs}))

    original, calls = sft.labelled_logprobs, []

    def fails(model, batch):
        calls.append(None)
        return original(model, batch) * (float("nan") if len(calls) == at else 1.0)

    monkeypatch.setattr(sft, "labelled_logprobs", fails)
    stopped = f"run/stopped-in-00000{at}"
    with pytest.raises(NotFiniteError, match=f"step {at}: the loss .*model before that is in {stopped}"):
        sft.train(sft_config(tiny_model, "run", **settings))
    assert len(calls) == min(at + 1, 4)
    assert [line["step"] for line in lines("run", "metrics.jsonl")] == [*range(1, at)]
    assert [path.name for path in Path("run/state").iterdir()] == [f"step-00000{at - 1}"]
    assert_equal(weights("short"), weights(stopped))
    monkeypatch.setattr(sft, "labelled_logprobs", original)
    sft.train(sft_config(tiny_model, "run", resume=True, **settings))
    assert_equal(weights("whole"), weights("run"))
    losses = [[line["loss"] for line in lines(run, "metrics.jsonl")] for run in ("whole", "run")]
    assert losses[0] == losses[1]


def test_a_step_that_ruins_the_weights_is_named_and_no_state_is_saved(workplace, tiny_model):
    message = r"^step 1: a weight is NaN or infinite \(\d+ values\) after its optimizer step. No state was saved"
    with pytest.raises(NotFiniteError, match=message):
        sft.train(sft_config(tiny_model, "run", learning_rate=1e39))
    assert len(lines("run", "metrics.jsonl")) == 1
    assert not Path("run/state").exists()
