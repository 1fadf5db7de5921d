"""AdamW over what trains: gradients of a minibatch's packed rows add up in fp32, then one step."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import get_scheduler

from fastp3o.config import StageConfig
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.sharding import shard, whole
from fastp3o.precision import Precision
from fastp3o.training.finite import NotFiniteError, require_finite
from fastp3o.training.masters import Masters

KINDS = ("weights", "step", "exp_avg", "exp_avg_sq")  # of a parameter's tensors: itself, and what AdamW has of it


class Optimizer:
    """A model that trains, its optimizer, the schedule of the learning rate, and what the precision needs besides.

    Brings the model to the device, or spreads it over a mesh of processes. learning_rates: of those submodules that
    have one of their own, by name.

    parameters: what the optimizer moves, in fp32, by their names in the model. steps: taken by this object.
    learning_rate: of the first group, in the last step; before there was one, in the next.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: PackedModel,
        precision: Precision,
        config: StageConfig,
        steps: int,
        learning_rates: Mapping[str, float] | None = None,
        mesh: DeviceMesh | None = None,
    ):
        self.accelerator, self.precision, self.max_grad_norm = accelerator, precision, config.max_grad_norm
        self.model, self.steps = model, 0
        half = precision.weights if precision.half else None
        self.masters = Masters(model, half, accelerator.device) if half is not None and mesh is None else None
        shard(model, accelerator.device, mesh, dtype=half)
        self.parameters = (
            {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
            if self.masters is None
            else self.masters.parameters
        )
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.parameters, config.learning_rate, learning_rates or {}),
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
        self.learning_rate = self.next_learning_rate()
        # Gradients of a mean over pairs are small; torch's own start of 2**16 loses more first steps.
        fp16 = precision.weights == torch.float16
        self.scaler = torch.amp.GradScaler(accelerator.device.type, init_scale=2.0**12, enabled=fp16)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self, loss: Tensor) -> dict[str, Tensor]:
        """One step from the gradients so far. Returns the norm of the first group's, and in fp16 the scale of the
        loss.

        An fp16 gradient that overflows is left out, and the scale halved. Raises NotFiniteError, before anything has
        moved, when `loss` or another gradient is not finite.
        """
        self.scaler.unscale_(self.optimizer)
        # Each group has a norm of its own: a critic's large gradients must not shrink the policy's.
        groups = self.optimizer.param_groups
        norms = [whole(nn.utils.clip_grad_norm_(group["params"], self.max_grad_norm)) for group in groups]
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
        if self.masters is not None:
            self.masters.round()
        self.optimizer.zero_grad()
        self.learning_rate = self.next_learning_rate()
        self.schedule.step()
        self.steps += 1
        return metrics

    def next_learning_rate(self) -> float:
        return self.schedule.get_last_lr()[0]

    def tensors(self) -> dict[str, Tensor]:
        """What moves, in fp32 and by full names: the weights that train, and AdamW's step and moments of each."""
        tensors = {f"weights.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for kind, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{kind}.{name}"] = value
        return tensors

    def fill(self, names: Iterable[str], read: Callable[[dict[str, Tensor]], None]) -> None:
        """Lets `read` fill the tensors of these names in place.

        Raises ValueError where they are not those of this model.
        """
        for name in names:
            kind, _, parameter_name = name.partition(".")
            parameter = self.parameters.get(parameter_name)
            if parameter is None or kind not in KINDS:
                raise ValueError(f"the state has {name}, which is nothing that this model trains")
            if kind != "weights":
                like = torch.zeros((), device=parameter.device) if kind == "step" else torch.zeros_like(parameter)
                self.optimizer.state[parameter].setdefault(kind, like)
        read(self.tensors())
        if self.masters is not None:
            self.masters.round()

    def state_dict(self) -> dict[str, Any]:
        """What is not a tensor: steps of the schedule, and the scale of the loss."""
        return {"steps": self.schedule.last_epoch, "loss_scale": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Learning rates and the rest of AdamW's settings stay as they are configured now."""
        if state["steps"]:
            before = {"last_epoch": state["steps"] - 1, "_step_count": state["steps"] + 1}
            self.schedule.load_state_dict(self.schedule.state_dict() | before)
            self.schedule.step()
            self.learning_rate = self.next_learning_rate()
        if state["loss_scale"]:
            self.scaler.load_state_dict(state["loss_scale"])


def parameter_groups(
    parameters: dict[str, nn.Parameter], learning_rate: float, learning_rates: Mapping[str, float]
) -> list[dict]:
    """AdamW's groups: each submodule with a learning rate of its own, behind all that has the common one."""
    common: list[nn.Parameter] = []
    own: dict[str, list[nn.Parameter]] = {module: [] for module in learning_rates}
    for name, parameter in parameters.items():
        module = next((module for module in own if name.startswith(module + ".")), None)
        (common if module is None else own[module]).append(parameter)
    groups = [{"params": common, "lr": learning_rate}]
    groups += [{"params": own[module], "lr": rate} for module, rate in learning_rates.items()]
    return [group for group in groups if group["params"]]
