"""P3O in transformers' Trainer is fastp3o's own update, in one process and in two."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastp3o.integrations import padded_pairs, pairs_trainer
from fastp3o.integrations.pairs_trainer import PairsCollator
from tests.fastp3o.integrations import pairs_runs
from tests.fastp3o.integrations.own_trainer import (
    assert_own_update,
    left_by_two,
    recorded,
    split_minibatches,
    two_processes,
)
from tests.fastp3o.integrations.pairs_runs import RECORDS, pairs


def test_the_update_is_fastp3os_own(tmp_path, tiny_model, monkeypatch):
    """There is a column of labels, accumulation, and a last microbatch of one record."""
    monkeypatch.setattr(pairs_trainer, "padded_p3o_loss", pairs_trainer.padded_p3o_loss)
    microbatches = recorded(pairs_trainer)
    trainer = pairs(str(tmp_path), tiny_model)
    assert [len(groups) for groups in microbatches] == [2, 2, 1] * 2
    # In the second epoch old log-probs are still those of the data set.
    assert_own_update(trainer.model.state_dict(), tiny_model, [split_minibatches(microbatches, 3)])


def test_two_processes_train_one_model_and_it_is_fastp3os_own(tmp_path, tiny_model):
    two_processes(pairs_runs.__file__, tmp_path, tiny_model)
    weights, microbatches = left_by_two(tmp_path, "pairs")
    assert [len(groups) for groups in microbatches] == [3, 2]
    assert_own_update(weights, tiny_model, [split_minibatches(microbatches, 2)])


def test_bf16_trains_in_bf16(tmp_path, tiny_model, monkeypatch):
    seen = []

    def looking(*arguments, **options):
        seen.append(torch.is_autocast_enabled("cpu"))
        return linear_p3o_loss(*arguments, **options)

    linear_p3o_loss = padded_pairs.linear_p3o_loss
    monkeypatch.setattr(padded_pairs, "linear_p3o_loss", looking)
    pairs(str(tmp_path), tiny_model, bf16=True, max_steps=1)
    assert seen == [True] * 3


def test_the_first_ratio_is_one_in_bf16_too(tmp_path, tiny_model, monkeypatch):
    found = []

    def looking(*arguments, **options):
        loss, metrics = padded_loss(*arguments, **options)
        found.append((metrics["ratio_mean"], metrics["kl"]))
        return loss, metrics

    padded_loss = pairs_trainer.padded_p3o_loss
    monkeypatch.setattr(pairs_trainer, "padded_p3o_loss", looking)
    for options in ({}, {"bf16": True}):
        pairs(str(tmp_path), tiny_model, max_steps=1, num_train_epochs=1, **options)
    torch.testing.assert_close(torch.tensor(found), torch.tensor([[1.0, 0.0]] * 6), rtol=0, atol=1e-5)


def test_evaluation_is_the_loss_of_the_start(tmp_path, tiny_model):
    trainer = pairs(str(tmp_path), tiny_model, max_steps=1)
    trainer.model.load_state_dict(AutoModelForCausalLM.from_pretrained(tiny_model).state_dict())
    # The policy is the reference, so u is 0.
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] == pytest.approx(0, abs=1e-5)


def test_adapters_train_but_not_on_the_head(tmp_path, tiny_model):
    peft = pytest.importorskip("peft")

    def adapted(*targets):
        def change(model):
            return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=list(targets)))

        return change

    trainer = pairs(str(tmp_path), tiny_model, adapted("q_proj", "v_proj"))
    found = [weight.abs().sum() for name, weight in trainer.model.named_parameters() if "lora_B" in name]
    assert len(found) == 4
    assert all(found)
    with pytest.raises(ValueError, match="plain linear layer"):
        pairs(str(tmp_path), tiny_model, adapted("lm_head"))


def test_records_that_disagree_are_refused():
    collate = PairsCollator(pad_token_id=1)
    batch = collate(RECORDS)
    assert set(batch) == {"input_ids", "attention_mask", "response_mask", "rewards"}
    with pytest.raises(ValueError, match=r"record 1 of the batch has lists of .*'rewards': 3"):
        collate([RECORDS[0], RECORDS[1] | {"rewards": [1.0, 2.0, 3.0]}])
    with pytest.raises(ValueError, match="record 0 of the batch has an empty prompt"):
        collate([RECORDS[0] | {"prompt_ids": []}])
