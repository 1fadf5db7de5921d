import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from fastp3o.config import StageConfig
from fastp3o.models.loading import load_policy
from fastp3o.models.packed_model import scored_logprobs
from fastp3o.models.trainable import freeze_below
from fastp3o.precision import precision_of
from fastp3o.training.finite import NotFiniteError
from fastp3o.training.optimizer import HalfWeights, Optimization
from tests.fastp3o.models.model_families import PAIRS

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


def optimization_of(model: nn.Module, dtype: torch.dtype, **settings) -> Optimization:
    config = StageConfig(
        model="", output_dir="", **({"learning_rate": 1e-3, "weight_decay": 0.0, "max_grad_norm": 1e9} | settings)
    )
    return Optimization(Accelerator(cpu=True), model, precision_of(NAMES[dtype], "fp32"), config, steps=100)


def backward(optimization: Optimization, *gradients: list[float]) -> Tensor:
    """Of some microbatches; returns the sum of their losses."""
    total = torch.zeros(())
    for number, gradient in enumerate(gradients, 1):
        with optimization.row(last=number == len(gradients)):
            loss = optimization.model(torch.tensor(gradient))
            optimization.backward(loss)
        total += loss.detach()
    return total


@HALVES
def test_gradients_add_up_in_fp32(dtype):
    model = Weights([1.0, 2.0])
    weights = HalfWeights(Accelerator(cpu=True), model, dtype)
    small = 2**-12
    assert torch.tensor(1.0, dtype=dtype) + small == 1  # lost where gradients are of the weights' dtype
    model(torch.tensor([1.0, -1.0])).backward()
    for _ in range(1000):
        model(torch.tensor([small, small])).backward()
    (master,) = weights.parameters
    assert master.grad.tolist() == [1 + 1000 * small, -1 + 1000 * small]
    assert master.grad.dtype == torch.float32
    assert model.weight.grad is None


@HALVES
def test_only_what_trains_has_a_master(dtype):
    model = Weights([1.0, 2.0])
    weights = HalfWeights(Accelerator(cpu=True), model, dtype)
    assert [master.tolist() for master in weights.parameters] == [[1.0, 2.0]]
    assert [master.dtype for master in weights.parameters] == [torch.float32]
    assert model.weight.dtype == model.frozen.dtype == dtype
    assert model.fine.dtype == torch.float32  # buffers keep their precision


def test_masters_are_of_the_weights_before_rounding():
    model = Weights([1 + 2**-12, 0.1])
    (master,) = HalfWeights(Accelerator(cpu=True), model, torch.bfloat16).parameters
    assert torch.equal(master, torch.tensor([1 + 2**-12, 0.1]))
    assert torch.equal(model.weight, master.bfloat16())


@HALVES
def test_masters_move_and_the_weights_are_their_rounding(dtype):
    model = Weights([1.0, -3.0])
    optimization = optimization_of(model, dtype, learning_rate=1e-5)
    (master,) = optimization.weights.parameters
    seen, moved = [], []
    for _ in range(50):
        before = master.detach().clone()
        optimization.step(backward(optimization, [0.5, -0.5]))
        moved.append(bool((master != before).all()))
        assert torch.equal(model.weight, master.to(dtype))
        assert master.grad is None
        seen.append(model.weight[0].item())
    assert all(moved)
    torch.testing.assert_close(master.detach(), torch.tensor([1.0 - 50e-5, -3.0 + 50e-5]), atol=1e-6, rtol=0.0)
    # One step is far below the distance of two numbers of the dtype.
    assert seen[0] == 1
    if dtype == torch.float16:
        assert seen[-1] < 1


@HALVES
def test_half_precision_steps_as_fp32_does_from_the_same_gradients(dtype):
    settings = {"weight_decay": 0.1, "max_grad_norm": 0.25, "lr_schedule": "linear", "warmup_steps": 2}
    half, full = Weights([1.0, -3.0]), Weights([1.0, -3.0])
    optimizations = optimization_of(half, dtype, **settings), optimization_of(full, torch.float32, **settings)
    for step in range(5):
        metrics = [o.step(backward(o, [0.5, step / 8], [0.25, -0.5])) for o in optimizations]
        assert optimizations[0].learning_rate == optimizations[1].learning_rate
        torch.testing.assert_close(metrics[0]["grad_norm"], metrics[1]["grad_norm"])
    (master,) = optimizations[0].weights.parameters
    torch.testing.assert_close(master, full.weight)
    assert metrics[1].keys() == {"grad_norm"}


def test_a_part_without_gradient_stands_still():
    class Two(Weights):
        def __init__(self):
            super().__init__([1.0])
            self.unused = nn.Parameter(torch.tensor([5.0]))

    model = Two()
    optimization = optimization_of(model, torch.bfloat16, learning_rate=0.1)
    optimization.step(backward(optimization, [1.0]))
    assert model.unused.item() == 5
    assert model.weight.item() < 1


def test_masters_survive_a_round_trip():
    model, other = Weights([1.0, 0.1]), Weights([7.0, 8.0])
    weights, others = (HalfWeights(Accelerator(cpu=True), m, torch.bfloat16) for m in (model, other))
    state = {name: value.clone() for name, value in weights.state_dict().items()}
    assert list(state) == ["0"]
    others.load_state_dict(state)
    assert torch.equal(others.parameters[0], torch.tensor([1.0, 0.1]))
    assert torch.equal(other.weight, model.weight)
    assert others.parameters[0].requires_grad


@HALVES
def test_a_run_goes_on_from_its_state_as_if_it_had_not_stopped(tmp_path, dtype):
    def run(optimization, steps):
        for step in steps:
            optimization.step(backward(optimization, [1.0, 0.1 * step]))
        return [optimization.weights.parameters[0].tolist(), optimization.model.weight.tolist()]

    settings = {"lr_schedule": "cosine", "warmup_steps": 1}
    optimization = optimization_of(Weights([1.0, 2.0]), dtype, **settings)
    run(optimization, range(3))
    optimization.accelerator.save_state(str(tmp_path))
    expected = run(optimization, range(3, 6))
    resumed = optimization_of(Weights([9.0, 9.0]), dtype, **settings)
    resumed.accelerator.load_state(str(tmp_path))
    assert run(resumed, range(3, 6)) == expected
    assert resumed.learning_rate == optimization.learning_rate
    assert resumed.scaler.get_scale() == optimization.scaler.get_scale()


def test_an_fp16_gradient_that_overflows_is_left_out_and_the_scale_halved():
    model = Weights([1.0, 2.0])
    optimization = optimization_of(model, torch.float16)
    (master,) = optimization.weights.parameters
    scales = []
    while True:
        metrics = optimization.step(backward(optimization, [48.0, 0.0], [0.0, 1.0]))
        scales.append(metrics["loss_scale"].item())
        assert master.grad is None
        if metrics["grad_norm"] > 0:
            break
        assert master.tolist() == [1.0, 2.0]
        assert not optimization.optimizer.state[master].get("step", torch.zeros(())).any()
    # 48 times 2^12 and 2^11 are above 65504.
    assert scales == [2**11, 2**10, 2**10]
    torch.testing.assert_close(metrics["grad_norm"], torch.tensor(48.0**2 + 1).sqrt())
    torch.testing.assert_close(master.detach(), torch.tensor([0.999, 1.999]))


def test_an_fp16_gradient_that_is_never_finite_stops():
    model = Weights([1.0, 2.0])
    optimization = optimization_of(model, torch.float16)

    def step():
        # Its loss is finite.
        backward(optimization, [float("inf"), 0.0])
        return optimization.step(torch.zeros(()))

    for _ in range(12):
        assert step()["grad_norm"] == 0
    with pytest.raises(NotFiniteError, match="the gradient is NaN or infinite at any scale"):
        step()
    assert optimization.weights.parameters[0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", NAMES)
def test_a_loss_that_is_not_finite_moves_nothing(dtype):
    model = Weights([1.0, 2.0])
    optimization = optimization_of(model, dtype)
    loss = backward(optimization, [1.0, 1.0]) * float("nan")
    with pytest.raises(NotFiniteError, match="the loss"):
        optimization.step(loss)
    assert [p.tolist() for p in optimization.weights.parameters] == [[1.0, 2.0]]
    assert model.weight.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_scale_an_infinite_gradient_stops_at_once(dtype):
    model = Weights([1.0, 2.0])
    optimization = optimization_of(model, dtype)
    backward(optimization, [float("inf"), 1.0])
    with pytest.raises(NotFiniteError, match="the loss or the gradient"):
        optimization.step(torch.zeros(()))
    assert model.weight.tolist() == [1.0, 2.0]


def test_gradients_are_scaled_down_to_a_norm():
    model = Weights([1.0, 1.0])
    optimization = optimization_of(model, torch.float32, max_grad_norm=1.0, adam_eps=1.0, learning_rate=1.0)
    metrics = optimization.step(backward(optimization, [3.0, 4.0]))
    assert metrics["grad_norm"] == 5
    # AdamW's first step is g / (|g| + eps).
    torch.testing.assert_close(model.weight.detach(), torch.tensor([1 - 0.6 / 1.6, 1 - 0.8 / 1.8]))


def test_fp32_weights_are_their_own_masters():
    model = Weights([1.0, 2.0])
    optimization = optimization_of(model, torch.float32)
    assert [id(p) for p in optimization.weights.parameters] == [id(model.weight)]
    assert not optimization.scaler.is_enabled()


@HALVES
def test_a_policy_with_tied_embeddings_has_one_master_for_both(tiny_model, dtype):
    policy, plain = load_policy(tiny_model), load_policy(tiny_model)
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(dtype)
    optimization = optimization_of(policy, dtype)
    row = PAIRS.row()
    scored_logprobs(policy, row).sum().backward()
    scored_logprobs(plain, row).sum().backward()
    named = list(plain.named_parameters())
    assert len(named) == len(optimization.weights.parameters)
    for (name, parameter), master in zip(named, optimization.weights.parameters, strict=True):
        assert torch.equal(master.grad, parameter.grad.float()), name
    assert all(buffer.dtype == torch.float32 for name, buffer in policy.named_buffers() if "inv_freq" in name)


def test_frozen_layers_take_no_memory_for_masters(tiny_model):
    policy = load_policy(tiny_model)
    freeze_below(policy, 1)
    optimization = optimization_of(policy, torch.bfloat16)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    assert 0 < len(trained) < len(list(policy.parameters()))
    assert [p.shape for p in optimization.weights.parameters] == [p.shape for p in trained]
    before = [parameter.clone() for parameter in policy.parameters()]
    with optimization.row(last=True):
        loss = scored_logprobs(optimization.model, PAIRS.row()).mean()
        optimization.backward(loss)
    optimization.step(loss.detach())
    for parameter, old in zip(policy.parameters(), before, strict=True):
        assert parameter.dtype == torch.bfloat16
        assert parameter.requires_grad or torch.equal(parameter, old)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_submodule_can_have_a_learning_rate_and_a_gradient_norm_of_its_own(dtype):
    model = Weights([1.0, 2.0])
    model.critic = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.critic.weight)
    config = StageConfig(model="", output_dir="", learning_rate=2**-3, weight_decay=0.0, max_grad_norm=1.0)
    precision = precision_of(NAMES[dtype], "fp32")
    rates = {"critic": 2**-1}
    optimization = Optimization(Accelerator(cpu=True), model, precision, config, steps=100, learning_rates=rates)
    with optimization.row(last=True):
        loss = (model.weight * torch.tensor([0.5, -0.5], dtype=dtype)).sum() + 1000 * model.critic.weight.sum()
        optimization.backward(loss)
    metrics = optimization.step(loss.detach())
    assert metrics["grad_norm"].item() == pytest.approx(0.5**0.5), "of the model, and not shrunk by the critic's"
    # Adam's first step is the learning rate.
    assert model.weight.tolist() == pytest.approx([1 - 2**-3, 2 + 2**-3])
    assert model.critic.weight.item() == pytest.approx(-(2**-1))
    assert optimization.learning_rate == 2**-3


def test_a_submodule_that_explodes_stops_the_step():
    model = Weights([1.0])
    model.critic = nn.Linear(1, 1, bias=False)
    config = StageConfig(model="", output_dir="")
    optimization = Optimization(
        Accelerator(cpu=True), model, precision_of("fp32", "fp32"), config, steps=1, learning_rates={"critic": 1.0}
    )
    with optimization.row(last=True):
        optimization.backward(model.weight.sum() + float("inf") * model.critic.weight.sum())
    with pytest.raises(NotFiniteError):
        optimization.step(torch.zeros(()))
    assert model.weight.item() == 1
