from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastp3o.processes import NotFiniteError
from fastp3o.training import sft
from fastp3o.training.reward_model import RewardModelConfig
from fastp3o.training.sft import SFTConfig
from tests.fastp3o.runs import assert_equal, metrics, weights

COMMON = {
    "max_response_tokens": 16,
    "epochs": 30,
    "batch_size": 8,
    "learning_rate": 1e-2,
    "report_to": "none",
    "precision": "fp32",
}


def sft_config(tiny_model, output_dir, **changes):
    data = {"train_data": "sft.jsonl", "eval_data": "sft.jsonl"}
    return SFTConfig(**(COMMON | data | {"model": tiny_model, "output_dir": output_dir} | changes))


def reward_config(tiny_model, output_dir, **changes):
    data = {"train_data": "preferences.jsonl", "eval_data": "preferences.jsonl"}
    return RewardModelConfig(**(COMMON | data | {"model": tiny_model, "output_dir": output_dir} | changes))


@pytest.mark.parametrize("train_on_prompt", [False, True])
def test_the_loss_is_a_mean_over_labelled_tokens_however_they_are_packed(
    workplace, tiny_model, tokenizer, train_on_prompt
):
    for name, size in (("whole", 8192), ("parts", 40)):
        changes = {"tokens_per_row": size, "epochs": 3, "train_on_prompt": train_on_prompt}
        sft.train(sft_config(tiny_model, name, **changes))
    for whole, parts in zip(metrics("whole"), metrics("parts"), strict=True):
        assert whole["loss"] == pytest.approx(parts["loss"], rel=1e-4)

    model, losses = AutoModelForCausalLM.from_pretrained(tiny_model), []
    for word in ("tree", "house", "river", "cloud", "stone", "apple", "eagle", "ocean"):
        prompt, response = tokenizer(f"Say {word}:").input_ids, tokenizer(f" {word}").input_ids
        ids = torch.tensor([*prompt, *response, tokenizer.eos_token_id])
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])
        losses.append(-logprobs if train_on_prompt else -logprobs[len(prompt) - 1 :])
    assert metrics("whole", "eval.jsonl")[0]["loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


@pytest.mark.parametrize(("at", "precision"), [(2, "fp32"), (3, "fp16"), (4, "fp32")])
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
    assert [line["step"] for line in metrics("run")] == [*range(1, at)]
    assert [path.name for path in Path("run/state").iterdir()] == [f"step-00000{at - 1}"]
    assert_equal(weights("short"), weights(stopped))
    monkeypatch.setattr(sft, "labelled_logprobs", original)
    sft.train(sft_config(tiny_model, "run", resume=True, **settings))
    assert_equal(weights("whole"), weights("run"))
    assert [line["loss"] for line in metrics("run")] == [line["loss"] for line in metrics("whole")]


def test_a_step_that_ruins_the_weights_is_named_and_no_state_is_saved(workplace, tiny_model):
    message = r"^step 1: a weight is NaN or infinite \(\d+ values\) after its optimizer step. No state was saved"
    with pytest.raises(NotFiniteError, match=message):
        sft.train(sft_config(tiny_model, "run", learning_rate=1e39))
    assert len(metrics("run")) == 1
    assert not Path("run/state").exists()
