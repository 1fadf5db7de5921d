"""An objective that is a user's function of groups of responses.

Shapes: P prompts with K responses each, n tokens of some of these prompts.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fastp3o.calls.function import FunctionError, told
from fastp3o.objectives.base import GroupwiseObjective, LossAndMetrics, masked_tokens, with_count
from fastp3o.objectives.config.function import OUTPUTS, FunctionConfig
from fastp3o.packing.packed_row import PackedRow
from fastp3o.rewards.scaling import scaler_of_differences
from fastp3o_kernels import Groups
from fastp3o_kernels.checks import check_sum

LONGEST = 5  # tokens of a response in the trial


class FunctionObjective(GroupwiseObjective):
    """The function's sum, and its further sums as metrics `loss/NAME`, which are means over what
    divides the loss.

    Raises FunctionError if the function does not keep its contract on two small groups (`try_out`),
    which takes no model and no rollouts.
    """

    def __init__(self, config: FunctionConfig):
        self.config, self.name = config, str(config.objective)
        self.outputs = tuple(name for name in OUTPUTS if name in config.tensors)
        self.scaler = scaler_of_differences(config.reward_scaling, config.reward_clip)
        self.try_out()

    @property
    def label(self) -> str:
        return self.name.rpartition(":")[2]

    @property
    def reads_sampler(self) -> bool:
        return self.config.reads_sampler

    def divisor(self, row: PackedRow, loss_mask: Tensor | None) -> int:
        return (
            masked_tokens(row, loss_mask) if self.config.loss_mean == "token" else len(row.groups)
        )

    def sums(self, groups: Groups) -> LossAndMetrics:
        loss, metrics = self.called(groups)
        count: Tensor | int = len(groups.lengths)
        if self.config.loss_mean == "token":
            count = (groups.lengths * groups["loss_mask"]).sum()
        return loss, with_count({f"loss/{name}": value for name, value in metrics.items()}, count)

    def called(self, groups: Groups) -> LossAndMetrics:
        """The function's loss and metrics. It gets the tensors that it names: there is no other in
        its groups, either. Raises FunctionError if it raises.
        """
        assert self.config.function is not None
        named = {name: getattr(groups, name) for name in self.outputs}
        tensors = {name: groups[name] for name in self.config.tensors if name not in named}
        try:
            value = self.config.function(replace(groups, tensors=tensors), **tensors, **named)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            remedy = (
                "; it has the tensors that its parameters name"
                if isinstance(error, KeyError)
                else ""
            )
            raise FunctionError(
                f"the objective {self.name} failed: {told(error)}{remedy}"
            ) from error
        return value if isinstance(value, tuple) and len(value) == 2 else (value, {})

    # --- the trial before the run -----------------------------------------------------------------

    def try_out(self) -> None:
        """Calls the function with two groups of random numbers, and with each of them. Raises
        FunctionError if it gives no finite 0-d tensor with a gradient, or no sum over the groups.
        """
        generator = torch.Generator().manual_seed(0)
        parts = [self.random_group(generator) for _ in range(2)]
        both, *alone = (self.tried(groups) for groups in (joined(parts), *parts))
        for what in both:
            if any(what not in values for values in alone):
                raise FunctionError(
                    f"the objective {self.name} must return the same metrics for all groups: no {what}"
                )
            of_both, of_each = both[what], torch.stack([values[what] for values in alone])
            try:
                check_sum(f"{what} of the objective {self.name}", of_both, of_each)
            except ValueError as error:
                raise FunctionError(f"{error}; --loss_mean says what divides it") from None

    def tried(self, groups: Groups) -> dict[str, Tensor]:
        """The loss and metrics of a trial, each a sum. Raises FunctionError for what they must not
        be.
        """
        loss, metrics = self.called(groups)
        values = {
            "the loss": loss,
            **{f"the metric {name!r}": value for name, value in metrics.items()},
        }
        for what, value in values.items():
            if not isinstance(value, Tensor) or value.dim():
                got = (
                    f"one of shape {list(value.shape)}"
                    if isinstance(value, Tensor)
                    else f"{value!r:.80}"
                )
                raise FunctionError(
                    f"{what} of the objective {self.name} must be a 0-d tensor, got {got}"
                )
            if not value.isfinite():
                raise FunctionError(
                    f"{what} of the objective {self.name} is {value.item()} for a group of random numbers"
                )
        if not loss.requires_grad:
            raise FunctionError(
                f"the loss of the objective {self.name} has no gradient: it is detached, or a constant of the log-probs"
            )
        if maxima := [name for name in metrics if name.endswith("_max")]:
            raise FunctionError(
                f"the objective {self.name} returns {maxima[0]!r}, and metrics are sums, not maxima"
            )
        return {what: value.detach().double() for what, value in values.items()}

    def random_group(self, generator: torch.Generator) -> Groups:
        """A group with numbers in place of all that a function may take."""
        K = self.config.responses_per_prompt
        lengths = torch.randint(1, LONGEST + 1, (K,), generator=generator)
        n = int(lengths.sum())

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        logprobs = -noise(n).abs()
        tokens = {
            name: logprobs + 0.1 * noise(n)
            for name in ("old_tokens", "ref_tokens", "sampler_tokens")
        }
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        outputs = {
            "entropy": noise(n).abs().requires_grad_(),
            "mean_logit": noise(n),
            "is_top": noise(n) > 0,
        }
        groups = Groups(logprobs.requires_grad_(), offsets, K, {}, **outputs)
        loss_mask = torch.arange(K)[None] < max(1, K - 1)
        responses = {
            "old": groups.sums(tokens["old_tokens"]),
            "ref": groups.sums(tokens["ref_tokens"]),
        }
        return groups.having(**tokens, **responses, rewards=noise(1, K), loss_mask=loss_mask)


def joined(parts: Sequence[Groups]) -> Groups:
    """Groups one after the other, as a row has them."""
    first, second = parts
    return Groups(
        torch.cat([first.token_logprobs, second.token_logprobs]),
        torch.cat([first.cu_seqlens, first.cu_seqlens[-1] + second.cu_seqlens[1:]]),
        first.responses_per_group,
        {name: torch.cat([first.tensors[name], second.tensors[name]]) for name in first.tensors},
        **{name: torch.cat([getattr(first, name), getattr(second, name)]) for name in OUTPUTS},
    )
