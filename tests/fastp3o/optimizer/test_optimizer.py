import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, LlamaForCausalLM

from fastp3o import SFTConfig, train
from fastp3o.config import StageConfig
from fastp3o.errors import UserError
from fastp3o.models.loading import load_policy
from fastp3o.models.packed_model import labeled_logprobs
from fastp3o.models.trainable import freeze_below
from fastp3o.optimizer.masters import Masters
from fastp3o.optimizer.optimizer import Optimizer
from fastp3o.runtime.finiteness import NotFiniteError
from fastp3o.runtime.precision import choose_precision
from tests.fastp3o.backward import scaled_backward
from tests.fastp3o.models.model_families import PAIRS
from tests.fastp3o.runs import assert_resumes, weights

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Weights(nn.Module):
    """A loss of which the gradient is what it is called with."""

    def __init__(self, values: list[float]):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("fine", torch.tensor(1 / 3))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight.float() * gradient).sum()


def optimizer_for(
    model: nn.Module, dtype: torch.dtype, rates: dict[str, float] | None = None, **settings
) -> Optimizer:
    """rates: learning rates of submodules."""
    settings = {"learning_rate": 1e-3, "weight_decay": 0.0, "max_grad_norm": 1e9} | settings
    config, precision = (
        StageConfig(model="", output_dir="", **settings),
        choose_precision(NAMES[dtype], "fp32"),
    )
    return Optimizer(
        Accelerator(cpu=True), model, precision, config, steps=100, learning_rates=rates
    )


def backward(optimizer: Optimizer, *gradients: list[float]) -> Tensor:
    """Takes a step on some microbatches; returns the sum of their losses."""
    total = torch.zeros(())
    for gradient in gradients:
        loss = optimizer.model(torch.tensor(gradient))
        scaled_backward(optimizer, loss)
        total += loss.detach()
    return total


@HALVES
def test_what_trains_has_a_master_of_the_weights_before_rounding_where_gradients_add_up_in_fp32(
    dtype,
):
    model = Weights([1 + 2**-12, 0.1])
    (master,) = Masters(model, dtype, torch.device("cpu")).parameters.values()
    assert torch.equal(master, torch.tensor([1 + 2**-12, 0.1]))
    assert torch.equal(model.weight, master.to(dtype))
    assert model.weight.dtype == model.frozen.dtype == dtype
    assert model.fine.dtype == torch.float32  # buffers keep their precision
    small = 2**-12
    # lost where gradients are of the weights' dtype
    assert torch.tensor(1.0, dtype=dtype) + small == 1
    model(torch.tensor([1.0, -1.0])).backward()
    for _ in range(1000):
        model(torch.tensor([small, small])).backward()
    assert master.grad.tolist() == [1 + 1000 * small, -1 + 1000 * small]
    assert (master.grad.dtype, model.weight.grad) == (torch.float32, None)


@pytest.mark.parametrize("dtype", NAMES)
def test_steps_are_those_of_adamw_on_fp32_weights_after_clipping(dtype):
    """Gradients divided as AdamW reads them, against torch's clipping, which multiplies them
    beforehand.
    """
    plain = nn.Parameter(torch.tensor([1.0, -3.0]))
    torchs = torch.optim.AdamW([plain], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    settings = {"max_grad_norm": 0.3, "adam_eps": 1e-8, "weight_decay": 0.1}
    optimizer = optimizer_for(Weights([1.0, -3.0]), dtype, **settings)
    (own,) = optimizer.parameters.values()
    for step in range(20):
        metrics = optimizer.step(backward(optimizer, [0.5, step / 8], [0.25, -0.5]))
        plain.grad = torch.tensor([0.75, step / 8 - 0.5])
        torch.testing.assert_close(metrics["grad_norm"], nn.utils.clip_grad_norm_([plain], 0.3))
        torchs.step()
        torch.testing.assert_close(own.detach(), plain.detach(), atol=0.0, rtol=1e-6)
        assert torch.equal(optimizer.model.weight, own.to(dtype))
        assert own.grad is None
    assert metrics.keys() == (
        {"grad_norm", "loss_scale"} if dtype == torch.float16 else {"grad_norm"}
    )


def test_a_resumed_run_takes_its_own_settings_of_adamw_and_no_state_of_another_model():
    first = optimizer_for(Weights([1.0, 2.0]), torch.float32)
    first.step(backward(first, [1.0, 1.0]))
    changed = {"learning_rate": 0.5, "adam_beta1": 0.5, "adam_eps": 1e-3, "lr_schedule": "linear"}
    resumed = optimizer_for(Weights([1.0, 2.0]), torch.float32, **changed)
    for name in ("exp_avg.other", "reference_mean.weight"):
        with pytest.raises(
            ValueError, match=rf"the state has {name}, which is nothing that this model trains"
        ):
            resumed.fill([name], lambda tensors: None)
    assert resumed.tensors().keys() == {"weights.weight"}
    saved = first.tensors()
    resumed.fill(
        saved, lambda into: torch._foreach_copy_([into[name] for name in saved], [*saved.values()])
    )
    resumed.load_state_dict(first.state_dict())
    (group,) = resumed.optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"]) == (0.5 * 0.99, (0.5, 0.95), 1e-3)
    assert resumed.learning_rate == 0.5 * 0.99


def test_an_fp16_gradient_that_overflows_is_left_out_and_the_scale_halved():
    model = Weights([1.0, 2.0])
    optimizer = optimizer_for(model, torch.float16)
    (master,) = optimizer.parameters.values()
    scales = []
    while True:
        metrics = optimizer.step(backward(optimizer, [48.0, 0.0], [0.0, 1.0]))
        scales.append(metrics["loss_scale"].item())
        assert master.grad is None
        if metrics["grad_norm"] > 0:
            break
        assert master.tolist() == [1.0, 2.0]
        assert not optimizer.optimizer.state[master].get("step", torch.zeros(())).any()
    # 48 times 2^12 and 2^11 are above 65504.
    assert scales == [2**11, 2**10, 2**10]
    torch.testing.assert_close(metrics["grad_norm"], torch.tensor(48.0**2 + 1).sqrt())
    torch.testing.assert_close(master.detach(), torch.tensor([0.999, 1.999]))


@pytest.mark.parametrize("dtype", NAMES)
def test_an_infinite_gradient_stops_at_once_or_once_no_scale_is_low_enough(dtype):
    optimizer = optimizer_for(Weights([1.0, 2.0]), dtype)

    def step():
        # Its loss is finite.
        backward(optimizer, [float("inf"), 0.0])
        metrics = optimizer.step(torch.zeros(()))
        optimizer.require_finite()
        return metrics

    for _ in range(12 if dtype == torch.float16 else 0):
        assert step()["grad_norm"] == 0
    with pytest.raises(
        NotFiniteError,
        match="at any scale" if dtype == torch.float16 else "the loss or the gradient",
    ):
        step()
    assert optimizer.parameters["weight"].tolist() == optimizer.model.weight.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("dtype", NAMES)
def test_after_a_failure_no_step_moves_anything_until_the_host_reads_of_it(dtype, name):
    _ = name == "adamw" or pytest.importorskip("bitsandbytes")
    optimizer = optimizer_for(Weights([1.0, 2.0]), dtype, optimizer=name)
    optimizer.step(backward(optimizer, [1.0, 1.0]))
    optimizer.require_finite()
    optimizer.step(backward(optimizer, [1.0, 1.0]))
    before = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    optimizer.step(backward(optimizer, [1.0, 1.0]) * float("nan"))
    optimizer.step(backward(optimizer, [1.0, 1.0]))
    assert optimizer.steps == 4
    with pytest.raises(NotFiniteError, match=r"NaN or infinite \(1 value\)"):
        optimizer.require_finite()
    assert optimizer.steps == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.tensors().items())


@HALVES
def test_a_policy_has_one_master_of_tied_embeddings_and_none_of_frozen_layers_which_are_rounded(
    tiny_model, dtype
):
    policy, plain = load_policy(tiny_model), load_policy(tiny_model)
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(dtype)
    for model in (policy, plain):
        freeze_below(model, 1)
        model.model.get_input_embeddings().requires_grad_(True)
    optimizer = optimizer_for(policy, dtype)
    row = PAIRS.row()
    labeled_logprobs(policy, row).sum().backward()
    labeled_logprobs(plain, row).sum().backward()
    trained = {
        name: parameter for name, parameter in plain.named_parameters() if parameter.requires_grad
    }
    assert trained.keys() == optimizer.parameters.keys()
    assert len(trained) < len(list(policy.parameters()))
    for name, parameter in trained.items():
        assert torch.equal(optimizer.parameters[name].grad, parameter.grad.float()), name
    assert all(parameter.dtype == dtype for parameter in policy.parameters())
    assert all(
        buffer.dtype == torch.float32
        for name, buffer in policy.named_buffers()
        if "inv_freq" in name
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_submodule_can_have_a_learning_rate_and_a_gradient_norm_of_its_own(dtype):
    model = Weights([1.0, 2.0])
    model.critic = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.critic.weight)
    model.unused = nn.Parameter(torch.tensor([5.0]))
    optimizer = optimizer_for(
        model, dtype, {"critic": 2**-1}, learning_rate=2**-3, max_grad_norm=1.0
    )
    loss = (
        model.weight * torch.tensor([0.5, -0.5], dtype=dtype)
    ).sum() + 1000 * model.critic.weight.sum()
    scaled_backward(optimizer, loss)
    metrics = optimizer.step(loss.detach())
    assert metrics["grad_norm"].item() == pytest.approx(0.5**0.5), (
        "of the model, and not shrunk by the critic's"
    )
    # Adam's first step is the learning rate.
    assert model.weight.tolist() == pytest.approx([1 - 2**-3, 2 + 2**-3])
    assert model.critic.weight.item() == pytest.approx(-(2**-1))
    assert model.unused.item() == 5, "without a gradient it stands still"
    assert optimizer.learning_rate == 2**-3
    # One that explodes stops the step of all.
    before = model.weight.tolist()
    scaled_backward(optimizer, model.weight.sum() + float("inf") * model.critic.weight.sum())
    optimizer.step(torch.zeros(()))
    with pytest.raises(NotFiniteError):
        optimizer.require_finite()
    assert model.weight.tolist() == before


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_with_8_bit_moments_is_near_adamws_and_resumes_to_the_bit(
    workplace, tiny_model, tokenizer, precision
):
    pytest.importorskip("bitsandbytes")
    # so that some tensors are large enough
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "head_dim": 32,
    }
    LlamaForCausalLM(AutoConfig.from_pretrained(tiny_model, **sizes)).save_pretrained("larger")
    tokenizer.save_pretrained("larger")
    settings = {
        "train_data": "sft.jsonl",
        "batch_size": 4,
        "epochs": 3,
        "report_to": "none",
        "save_every": 3,
    }
    settings |= {
        "precision": precision,
        "learning_rate": 0.01,
        "adam_eps": 1e-3,
        "max_grad_norm": 0.1,
    }
    config = SFTConfig(model="larger", output_dir="eight", optimizer="adamw_8bit", **settings)
    train(config)
    assert_resumes(config)
    (state,) = Path("eight-resumed").glob("state/*6/*.safetensors")
    assert {weight.dtype for weight in load_file(state).values()} == {
        torch.float32,
        torch.int64,
        torch.uint8,
    }
    train(replace(config, output_dir="adamw", optimizer="adamw"))
    start, exact, eight = load_file("larger/model.safetensors"), weights("adamw"), weights("eight")
    assert all(
        (eight[name] - exact[name]).norm() < 0.1 * (exact[name] - start[name]).norm()
        for name in start
    )


def test_8_bit_moments_without_bitsandbytes_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastp3o.adamw_8bit", None)
    with pytest.raises(UserError, match="--optimizer adamw_8bit needs bitsandbytes: pip install"):
        optimizer_for(Weights([1.0]), torch.float32, optimizer="adamw_8bit")
