"""AdamW over what trains: gradients of a minibatch's packed rows add up in fp32, then one step."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import get_scheduler

from fastp3o.config import StageConfig
from fastp3o.models.packed_model import PackedModel
from fastp3o.precision import Precision
from fastp3o.training.finite import NotFiniteError, require_finite


class Optimizer:
    """A model that trains, its optimizer, the schedule of the learning rate, and what the precision needs besides.

    Brings the model to the device. learning_rates: of those submodules that have one of their own, by name.

    model: the model to call, in a distributed wrapper where there is one. steps: taken by this object.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: PackedModel,
        precision: Precision,
        config: StageConfig,
        steps: int,
        learning_rates: dict[str, float] | None = None,
    ):
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.accelerator, self.precision, self.max_grad_norm = accelerator, precision, config.max_grad_norm
        self.steps = 0
        self.weights = (
            HalfWeights(accelerator, model, precision.weights) if precision.half else FullWeights(accelerator, model)
        )
        self.model = self.weights.model
        self.optimizer = torch.optim.AdamW(
            parameter_groups(trained, self.weights.parameters, config.learning_rate, learning_rates or {}),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        if config.warmup_steps > steps:
            raise ValueError(f"--warmup_steps is {config.warmup_steps}, and the run has {steps} optimizer steps")
        # transformers' constant schedule leaves out the warm-up.
        name = "constant_with_warmup" if config.lr_schedule == "constant" else config.lr_schedule
        self.schedule = get_scheduler(
            name, self.optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=steps
        )
        # Gradients of a mean over pairs are small; torch's own start of 2**16 loses more first steps.
        fp16 = precision.weights == torch.float16
        self.scaler = torch.amp.GradScaler(accelerator.device.type, init_scale=2.0**12, enabled=fp16)
        accelerator.prepare(self.optimizer)
        accelerator.register_for_checkpointing(self.schedule, self.scaler, *([self.weights] if precision.half else []))

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of one microbatch; processes add up their gradients in the last of a step."""
        with self.weights.accumulating(last=last), self.accelerator.autocast():
            yield

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self, loss: Tensor) -> dict[str, Tensor]:
        """One step from the gradients so far. Returns the norm of the first group's, and in fp16 the scale of the
        loss.

        An fp16 gradient that overflows is left out, and the scale halved. Raises NotFiniteError, before anything has
        moved, when `loss` or another gradient is not finite.
        """
        self.weights.gather_gradients()
        self.scaler.unscale_(self.optimizer)
        # Each group has a norm of its own: a critic's large gradients must not shrink the policy's.
        groups = self.optimizer.param_groups
        norms = [nn.utils.clip_grad_norm_(group["params"], self.max_grad_norm) for group in groups]
        norm = norms[0]
        if not self.scaler.is_enabled():
            require_finite(self.accelerator, "the loss or the gradient", torch.stack([loss, *norms]))
            self.optimizer.step()
            metrics = {"grad_norm": norm}
        else:
            require_finite(self.accelerator, "the loss", loss)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            scale = self.scaler.get_scale()
            if scale < 1:
                raise NotFiniteError("the gradient is NaN or infinite at any scale of the loss")
            metrics = {"grad_norm": norm.nan_to_num(0.0, 0.0), "loss_scale": norm.new_tensor(scale)}
        self.weights.copy_from_masters()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.steps += 1
        return metrics

    @property
    def learning_rate(self) -> float:
        return self.schedule.get_last_lr()[0]


def parameter_groups(
    names: list[str], parameters: list[nn.Parameter], learning_rate: float, learning_rates: dict[str, float]
) -> list[dict]:
    """AdamW's groups: each submodule with a learning rate of its own, behind all that has the common one."""
    common: list[nn.Parameter] = []
    own: dict[str, list[nn.Parameter]] = {module: [] for module in learning_rates}
    for name, parameter in zip(names, parameters, strict=True):
        module = next((module for module in own if name.startswith(module + ".")), None)
        (common if module is None else own[module]).append(parameter)
    groups = [{"params": common, "lr": learning_rate}]
    groups += [{"params": own[module], "lr": rate} for module, rate in learning_rates.items()]
    return [group for group in groups if group["params"]]


class FullWeights:
    """fp32 weights, which the optimizer moves itself; accelerate's wrapper adds up gradients over processes."""

    def __init__(self, accelerator: Accelerator, model: PackedModel):
        self.accelerator = accelerator
        self.model = accelerator.prepare(model)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def accumulating(self, *, last: bool):
        return nullcontext() if last else self.accelerator.no_sync(self.model)

    def gather_gradients(self) -> None:
        """The wrapper has done it."""

    def copy_from_masters(self) -> None:
        """The optimizer has moved the weights themselves."""


class HalfWeights:
    """Weights in half precision, with fp32 copies of those that train.

    Each gradient is added to its copy's as soon as it is there, in fp32, and freed. Processes add up theirs before a
    step: a distributed wrapper would do it in half precision.
    """

    def __init__(self, accelerator: Accelerator, model: PackedModel, dtype: torch.dtype):
        self.accelerator = accelerator
        device = accelerator.device
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.parameters = [
            nn.Parameter(parameter.detach().to(device, torch.float32, copy=True)) for parameter in self.trained
        ]
        # Rounded first: the fp32 weights of what is frozen need not fit the device. Buffers stay as they are: rounded
        # rotary frequencies would move every position.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        self.model = model.to(device)
        for parameter, master in zip(self.trained, self.parameters, strict=True):
            parameter.register_post_accumulate_grad_hook(lambda trained, master=master: add_gradient(trained, master))

    def accumulating(self, *, last: bool):
        return nullcontext()

    def gather_gradients(self) -> None:
        for master in self.parameters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            if self.accelerator.num_processes > 1:
                master.grad = self.accelerator.reduce(master.grad, "mean")

    @torch.no_grad()
    def copy_from_masters(self) -> None:
        torch._foreach_copy_([*self.trained], [*self.parameters])

    def state_dict(self) -> dict[str, Tensor]:
        return {str(number): master.detach() for number, master in enumerate(self.parameters)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for number, master in enumerate(self.parameters):
            master.copy_(state[str(number)])
        self.copy_from_masters()


def add_gradient(trained: Tensor, master: Tensor) -> None:
    """Adds the gradient of a half-precision parameter, which must have one, to its master's, and frees it."""
    assert trained.grad is not None
    gradient = trained.grad.float()
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    trained.grad = None
