"""Adapters have dropout in the passes that train, and nowhere else."""

import pytest
import torch

from fastp3o.models.packed_model import labelled_logprobs
from fastp3o.models.trainable import SwitchedDropout, dropout_on
from tests.fastp3o.models.model_families import PAIRS, adapted

ROW = PAIRS.row()


def test_training_mode_alone_changes_nothing():
    model = adapted("llama", dropout=0.5).train()
    with torch.no_grad():
        expected = labelled_logprobs(adapted("llama"), ROW)
        assert torch.equal(labelled_logprobs(model, ROW), expected)
        with dropout_on(model):
            assert (labelled_logprobs(model, ROW) - expected).abs().max() > 0.1
        assert torch.equal(labelled_logprobs(model, ROW), expected)


def test_each_adapter_drops_this_share_of_its_inputs_and_scales_the_rest():
    model = adapted("llama", dropout=0.25)
    (layer,) = [module for name, module in model.named_modules() if name.endswith("layers.0.mlp.up_proj")]
    torch.manual_seed(0)
    with dropout_on(model):
        dropped = layer.lora_dropout["default"](torch.ones(100_000))
    assert dropped.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert sum(isinstance(module, SwitchedDropout) for module in model.modules()) == 14


def test_activations_that_are_computed_again_drop_the_same():
    gradients = []
    for checkpointed in (False, True):
        model = adapted("llama", dropout=0.5).train()
        if checkpointed:
            model.recompute_activations()
        torch.manual_seed(2)
        with dropout_on(model):
            labelled_logprobs(model, ROW).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert len(gradients[0]) == len(gradients[1]) == 28
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
