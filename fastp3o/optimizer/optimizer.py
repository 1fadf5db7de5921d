"""AdamW: the gradients of a minibatch's packed rows are added up in fp32, then one step is made."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LambdaLR

from fastp3o.config import OptimizerConfig
from fastp3o.errors import UserError
from fastp3o.models.overflow import Overflow, first_overflow, overflow
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.quantized import compute_in
from fastp3o.models.sharding import map_rows_in_lockstep, shard
from fastp3o.optimizer.adamw import DividingAdamW
from fastp3o.optimizer.masters import Masters, trained_parameters
from fastp3o.optimizer.step_guard import StepGuard
from fastp3o.packing.packed_row import PackedRow, to_device
from fastp3o.runtime.precision import Precision
from fastp3o.runtime.processes import sum_over_processes
from fastp3o.runtime.shares import Share, copies, local_part

# A parameter's tensors in a state: its value, and AdamW's state, as torch and as bitsandbytes names
# it.
KINDS = ("weights", "step", "exp_avg", "exp_avg_sq", "state1", "state2", "absmax1", "absmax2")
# Rows: a supervised step's loss is found not to be finite after the next step.
RECENT = 64


class Optimizer:
    """A model that trains, with AdamW, the learning-rate schedule, and in half precision fp32
    masters and a loss scale.

    Brings the model to the device, or spreads it over a mesh. learning_rates: of submodules that
    have their own. parameters: the fp32 parameters that the optimizer moves, by their names in the
    model. steps: taken by this object. learning_rate: the first group's in the last step, or before
    any step in the next one. share: of rows. recent: in fp16 the rows that were trained on last, in
    which an overflow can be looked for.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: PackedModel,
        precision: Precision,
        config: OptimizerConfig,
        steps: int,
        learning_rates: Mapping[str, float] | None = None,
        mesh: DeviceMesh | None = None,
    ):
        self.accelerator = accelerator
        self.precision = precision
        self.max_grad_norm = config.max_grad_norm
        self.model, self.steps, self.asked = model, 0, 0
        half = precision.weights if precision.half else None
        self.masters = (
            Masters(model, half, accelerator.device) if half is not None and mesh is None else None
        )
        shard(model, accelerator.device, mesh, dtype=half)
        compute_in(model, precision.autocast or precision.weights)
        self.parameters = (
            trained_parameters(model) if self.masters is None else self.masters.parameters
        )
        make = self.adamw(config, mesh)
        # First all with the common learning rate, then each submodule with its own.
        rates = {"": config.learning_rate, **(learning_rates or {})}
        groups: dict[str, list[nn.Parameter]] = {module: [] for module in rates}
        for name, parameter in self.parameters.items():
            groups[next((m for m in rates if m and name.startswith(f"{m}.")), "")].append(parameter)
        self.optimizer = make(
            [{"params": group, "lr": rates[module]} for module, group in groups.items() if group],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )
        self.schedule = schedule(self.optimizer, config, steps)
        self.learning_rate = self.next_learning_rate()
        self.share = Share.of(mesh)
        self.recent: deque[PackedRow] = deque(
            maxlen=RECENT if precision.weights == torch.float16 else 0
        )
        self.guard = StepGuard(accelerator, scaled=precision.weights == torch.float16)

    def adamw(self, config: OptimizerConfig, mesh: DeviceMesh | None) -> Callable[..., Any]:
        """What makes the AdamW of the configuration from groups of parameters. Raises UserError if
        it is bitsandbytes' and cannot run.
        """
        if config.optimizer != "adamw_8bit":
            return partial(DividingAdamW, fused=True)
        if mesh is not None:
            raise UserError(
                "--optimizer adamw_8bit trains in one process: bitsandbytes takes no shards of tensors"
            )
        try:
            from fastp3o.optimizer.adamw_8bit import DividingAdamW8bit
        except ImportError as error:
            raise UserError(
                "--optimizer adamw_8bit needs bitsandbytes: pip install '.[quantized]'"
            ) from error
        embeddings = [
            f"{name}.weight"
            for name, part in self.model.named_modules()
            if isinstance(part, nn.Embedding)
        ]
        return partial(
            DividingAdamW8bit,
            [self.parameters[name] for name in embeddings if name in self.parameters],
        )

    @property
    def loss_scale(self) -> Tensor | None:
        """The factor of the loss in a backward pass, 0-d fp32; None but in fp16."""
        return self.guard.scale

    # --- steps ------------------------------------------------------------------------------------

    def step(self, loss: Tensor) -> dict[str, Tensor]:
        """Makes a step from the gradients so far. Returns the first group's gradient norm, and in
        fp16 the loss scale. Does not wait for the device. If `loss` or the gradient is not finite,
        neither this step nor a later one moves anything, and `require_finite` raises. A step whose
        fp16 gradient overflows is skipped, and the scale halved.
        """
        scale, norms = self.guard.scale, self.gradient_norms()
        norms = norms if scale is None else norms / scale
        divisors = ((norms + 1e-6) / self.max_grad_norm).clamp(min=1.0)
        divisors = divisors if scale is None else divisors * scale
        self.optimizer.step(divisors, self.guard.skips(loss, norms))
        metrics = {"grad_norm": norms[0]}
        if scale is not None:
            metrics = {"grad_norm": norms[0].nan_to_num(0.0, 0.0), "loss_scale": scale.clone()}
        if self.masters is not None:
            self.masters.round()
        self.optimizer.zero_grad()
        self.learning_rate = self.next_learning_rate()
        self.schedule.step()
        self.steps += 1
        return metrics

    def gradient_norms(self) -> Tensor:
        """The norm of each group's gradients, [groups] fp32: a critic's large ones must not shrink
        the policy's.
        """
        # By group, and by the number of processes with the same part, which counts once.
        own_parts: dict[tuple[int, int], list[Tensor]] = {}
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                alike = own_parts.setdefault((number, copies(parameter)), [])
                if parameter.grad is not None and (part := local_part(parameter.grad)).numel():
                    alike.append(part)
        device = self.accelerator.device  # without gradients torch's zero is on the CPU
        norms = torch.stack(
            [
                nn.utils.get_total_norm(alike, foreach=True).to(device)
                for alike in own_parts.values()
            ]
        )
        if self.accelerator.num_processes == 1:
            return norms
        numbers, counts = to_device(tuple(map(torch.tensor, zip(*own_parts, strict=True))), device)
        squares = sum_over_processes(self.accelerator, norms.square()) / counts
        return (
            squares.new_zeros(len(self.optimizer.param_groups))
            .index_add(0, numbers, squares)
            .sqrt()
        )

    # --- gradients that are not finite ------------------------------------------------------------

    def require_finite(self) -> None:
        """Waits for the steps so far. Raises NotFiniteError if a loss or a gradient was not finite:
        that step and those after it have changed no weight, and do not count as `steps`.
        """
        if self.asked != self.steps:
            self.settle(self.steps, self.outcome().tolist())

    def outcome(self) -> Tensor:
        """The numbers that `settle` takes, which the host may read later. The steps so far count as
        asked for.
        """
        self.asked = self.steps
        return self.guard.numbers()

    def settle(self, steps: int, numbers: list[float]) -> None:
        """Raises as `require_finite`. numbers: the `outcome` after so many steps; later ones have
        changed no weight.
        """
        lost, error = self.guard.read(numbers)
        if error is not None:
            self.steps = self.asked = steps - lost
            raise error

    def overflow(self) -> Overflow | None:
        """The values of a recent row that overflow fp16, None if there are none. All processes must
        call it.
        """
        look = partial(overflow, self.model)
        if self.accelerator.num_processes == 1:
            return first_overflow(map(look, self.recent))
        return first_overflow(map_rows_in_lockstep([*self.recent], look) if self.recent else [])

    # --- the learning rate ------------------------------------------------------------------------

    def next_learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def set_peak_learning_rate(self, rate: float) -> None:
        """Sets the rate that the schedule multiplies for the first group, from the next step on."""
        self.schedule.base_lrs[0] = rate
        self.optimizer.param_groups[0]["lr"] = rate * self.schedule.lr_lambdas[0](
            self.schedule.last_epoch
        )

    # --- the state --------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The trained weights in fp32, and AdamW's step and moments of each, by names such as
        `exp_avg.NAME`.
        """
        tensors = {
            f"weights.{name}": parameter.detach() for name, parameter in self.parameters.items()
        }
        for name, parameter in self.parameters.items():
            state = self.optimizer.state.get(parameter, {})
            tensors |= {
                f"{kind}.{name}": torch.as_tensor(state[kind]) for kind in KINDS if kind in state
            }
        return tensors

    def fill(self, names: Iterable[str], read: Callable[[dict[str, Tensor]], None]) -> None:
        """Lets `read` fill the tensors with these names in place. Raises ValueError if the model
        lacks one.
        """
        for name in names:
            kind, _, parameter_name = name.partition(".")
            parameter = self.parameters.get(parameter_name)
            if parameter is None or kind not in KINDS:
                raise UserError(f"the state has {name}, which is nothing that this model trains")
            if kind != "weights" and not self.optimizer.state.get(parameter):
                self.optimizer.begin(parameter)
        read(tensors := self.tensors())
        for name, parameter in self.parameters.items():
            state = self.optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), int):
                # bitsandbytes has a number, of which the tensor is a copy.
                state["step"] = int(tensors[f"step.{name}"])
        if self.masters is not None:
            self.masters.round()

    def state_dict(self) -> dict[str, Any]:
        """The schedule's steps, the first rate as given and as set, the loss scale. Raises as
        `require_finite`.
        """
        self.require_finite()
        rates = [self.optimizer.defaults["lr"], self.schedule.base_lrs[0]]
        return {
            "steps": self.schedule.last_epoch,
            "rates": rates,
            "loss_scale": self.guard.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores that state. AdamW's settings stay as they are configured now, also a learning
        rate that is new.
        """
        if (rates := state.get("rates")) and rates[0] == self.optimizer.defaults["lr"]:
            # Older states have none.
            self.schedule.base_lrs[0] = rates[1]
        if state["steps"]:
            before = {"last_epoch": state["steps"] - 1, "_step_count": state["steps"] + 1}
            self.schedule.load_state_dict(self.schedule.state_dict() | before)
            self.schedule.step()
            self.learning_rate = self.next_learning_rate()
        self.guard.load_state_dict(state["loss_scale"])


def schedule(optimizer: Any, config: OptimizerConfig, steps: int) -> Any:
    """The learning rate's schedule over the run's steps. Raises UserError for a warm-up that is
    longer than the run.
    """
    if config.warmup_steps > steps:
        raise UserError(
            f"--warmup_steps is {config.warmup_steps}, and the run has {steps} optimizer steps"
        )
    if config.lr_schedule == "constant":
        # transformers' leaves out the warm-up, and its schedules import peft.
        warmup = config.warmup_steps
        return LambdaLR(optimizer, lambda step: step / warmup if step < warmup else 1.0)
    from transformers import get_scheduler

    return get_scheduler(config.lr_schedule, optimizer, config.warmup_steps, steps)
