"""AdamW with 8-bit moments, by bitsandbytes on the CPU."""

import json
import sys

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import AutoConfig, LlamaForCausalLM

from fastp3o.errors import UserError
from fastp3o.optimizer import Optimizer
from fastp3o.precision import choose_precision
from fastp3o.processes import NotFiniteError
from fastp3o.training.config import SFTConfig
from fastp3o.training.sft import train
from tests.fastp3o.runs import assert_equal, copy_at_save_before, metrics, weights
from tests.fastp3o.test_optimizer import NAMES, optimizer_for, resume

SETTINGS = {"optimizer": "adamw_8bit", "learning_rate": 0.01}


class Large(nn.Module):
    """A matrix with more elements than bitsandbytes keeps moments of in fp32, a smaller one, and embeddings."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(64, 128)
        self.up, self.down = nn.Linear(128, 64, bias=False), nn.Linear(64, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(self.up(self.embed(tokens)).tanh()).float().square().mean()


def moves(optimizer, steps) -> list[Tensor]:
    for step in steps:
        loss = optimizer.model(torch.arange(step, step + 20))
        (loss if optimizer.loss_scale is None else loss * optimizer.loss_scale).backward()
        optimizer.step(loss)
    return [parameter.detach().clone() for parameter in optimizer.parameters.values()]


@pytest.mark.parametrize("dtype", NAMES)
def test_a_run_goes_on_from_its_8_bit_state_to_the_bit(dtype):
    pytest.importorskip("bitsandbytes")
    optimizer = optimizer_for(Large(0), dtype, **SETTINGS)
    moves(optimizer, range(3))
    tensors = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    assert {name: tensors[f"state1.{name}.weight"].dtype for name in ("embed", "up", "down")} == {
        "embed": torch.float32,
        "up": torch.uint8,
        "down": torch.float32,
    }
    counters = json.loads(json.dumps(optimizer.state_dict()))
    expected = moves(optimizer, range(3, 6))
    resumed = optimizer_for(Large(1), dtype, **SETTINGS)
    resume(resumed, tensors, counters)
    assert all(map(torch.equal, moves(resumed, range(3, 6)), expected))
    after, other = optimizer.tensors(), resumed.tensors()
    assert after.keys() == other.keys()
    assert all(torch.equal(after[name], other[name]) for name in after)


@pytest.mark.parametrize("dtype", NAMES)
def test_its_steps_are_near_those_of_adamw_and_gradients_are_clipped_alike(dtype):
    pytest.importorskip("bitsandbytes")
    start = [weight.detach().clone() for weight in Large(0).parameters()]
    clipped = {"max_grad_norm": 1e-4, "adam_eps": 1e-4}  # so that the size of a gradient counts
    exact, eight = (
        moves(optimizer_for(Large(0), dtype, **(SETTINGS | clipped | {"optimizer": name})), range(10))
        for name in ("adamw", "adamw_8bit")
    )
    for before, one, two in zip(start, exact, eight, strict=True):
        assert (two - one).norm() < 0.05 * (one - before).norm()


@pytest.mark.parametrize("dtype", NAMES)
def test_a_step_that_is_skipped_moves_nothing(dtype):
    pytest.importorskip("bitsandbytes")
    optimizer = optimizer_for(Large(0), dtype, **SETTINGS)
    moves(optimizer, range(2))
    optimizer.require_finite()
    before = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    for failure in (float("nan"), 1.0):  # no step after a failure counts either
        loss = optimizer.model(torch.arange(20)) * failure
        loss.backward()
        optimizer.step(loss)
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.tensors().items())
    with pytest.raises(NotFiniteError):
        optimizer.require_finite()


def test_a_whole_run_resumes_to_the_bit(workplace, tiny_model, tokenizer):
    pytest.importorskip("bitsandbytes")
    LlamaForCausalLM(
        AutoConfig.from_pretrained(tiny_model, hidden_size=64, intermediate_size=128, head_dim=32)
    ).save_pretrained("larger")
    tokenizer.save_pretrained("larger")
    settings = {"train_data": "sft.jsonl", "eval_data": "sft.jsonl", "batch_size": 4, "epochs": 3, "report_to": "none"}
    settings |= {"precision": "fp32", "model": "larger", "save_every": 3, **SETTINGS}
    train(SFTConfig(**settings, output_dir="whole"))
    copy_at_save_before("whole", "resumed")
    train(SFTConfig(**settings, output_dir="resumed", resume=True))
    assert metrics("resumed") == metrics("whole")
    assert_equal(weights("resumed"), weights("whole"))
    before, after = metrics("whole", "eval.jsonl")
    assert after["loss"] < before["loss"]


def test_it_is_refused_where_it_cannot_be(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    monkeypatch.delitem(sys.modules, "fastp3o.adamw_8bit", raising=False)
    with pytest.raises(UserError, match=r"--optimizer adamw_8bit needs bitsandbytes: pip install '\.\[quantized\]'"):
        optimizer_for(Large(0), torch.float32, **SETTINGS)
    monkeypatch.setattr("fastp3o.optimizer.shard", lambda *_, **__: None)
    config, precision = SFTConfig(model="m", output_dir="o", **SETTINGS), choose_precision("fp32", "fp32")
    with pytest.raises(UserError, match="--optimizer adamw_8bit trains in one process: bitsandbytes takes no shards"):
        Optimizer(Accelerator(cpu=True), Large(0), precision, config, steps=9, mesh=object())
