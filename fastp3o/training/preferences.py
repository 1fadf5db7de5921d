"""Learning from offline preferences: DPO, KTO and related objectives
(`fastp3o.objectives.preferences`).
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset
from torch import Tensor, nn

from fastp3o.data.loading import load_preferences, load_prompts, load_unpaired_preferences
from fastp3o.errors import UserError
from fastp3o.evaluation.evaluate import Evaluation
from fastp3o.models.loading import load_policy
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.models.reference import LoadedForEachUse, Reference
from fastp3o.models.sharding import map_rows_in_lockstep
from fastp3o.objectives.base import LossAndMetrics
from fastp3o.objectives.config.preferences import KTOConfig, PreferenceConfig
from fastp3o.objectives.preferences import fixed_pair_sums, kto_sums
from fastp3o.packing.pack import pack
from fastp3o.packing.packed_row import PackedRow, to_device
from fastp3o.packing.shares import Examples
from fastp3o.packing.tables import sums_by_group
from fastp3o.rewards.load import load_rewards
from fastp3o.rewards.reward import asked_of_evaluations
from fastp3o.rollouts.plan import policy_sampler, sampled_model
from fastp3o.run.fingerprints import model_fingerprint
from fastp3o.runtime.context import Caller, Context
from fastp3o.runtime.processes import on_main_process
from fastp3o.training.build import load_fixed_reference
from fastp3o.training.reference_logprobs import ReferenceLogprobs
from fastp3o.training.rivals import with_rival
from fastp3o.training.setup import load_held_out
from fastp3o.training.supervised import SupervisedTask, train_supervised
from fastp3o_kernels import Groups, Head, LinearLossOutput, linear_loss
from fastp3o_kernels.losses import kto_reference_point

# --- the run --------------------------------------------------------------------------------------


def train(config: PreferenceConfig, caller: Caller | None = None) -> None:
    """Trains a policy on preferences with its configuration's objective; `loss` is a mean over
    pairs, or responses.
    """
    task = UnpairedPreferences(config) if isinstance(config, KTOConfig) else PreferencePairs(config)
    train_supervised(task, caller)


@dataclass(frozen=True)
class PreferenceRow(PackedRow):
    """A packed row of P groups of K responses, and the other inputs of its loss."""

    response_tensors: dict[str, Tensor]  # [P, K] each


# --- objectives as a stage sees them --------------------------------------------------------------


class Preferences(SupervisedTask[PreferenceRow]):
    """Base of pairs and single responses: the reference, the loss, sampled evaluations.

    Before the first step the reference's log-probs are computed, or found in their file; then the
    reference is dropped. sums: the loss of P groups, summed, and its metrics, from a configuration
    and these. columns: the responses whose log-probs they are; those of one tuple share their
    prompt in a row.
    """

    config: PreferenceConfig
    sums: Callable[[Any, Groups], LossAndMetrics]
    columns: tuple[tuple[str, ...], ...]
    load_model = staticmethod(partial(load_policy, trains=True))

    def __init__(self, config: PreferenceConfig):
        self.config, self.name = config, config.objective
        self.reference: Reference | None = None

    def set_up(self, context: Context, model: PackedModel, data: dict[str, Dataset]) -> None:
        """Loads the reference, unless its log-probs of all data are found."""
        super().set_up(context, model, data)
        config = self.config
        load = partial(load_fixed_reference, context, config, model)
        if config.eval_prompts:
            self.samples = sampled_evaluation(context, config, model, LoadedForEachUse(load))
        if config.reference_logprobs and not config.needs_reference:
            # No error, since sweeps over objectives give all of them the same folder.
            context.accelerator.print(
                "warning: --reference_logprobs has no effect without a reference"
            )
        if config.needs_reference:
            weights = on_main_process(
                context.accelerator,
                lambda: model_fingerprint(config.reference or config.model_source),
            )
            tempered = () if config.temperature == 1 else (config.temperature,)
            self.ref_logprobs = ReferenceLogprobs(
                context.accelerator,
                context.share,
                Path(config.reference_logprobs or config.output_dir),
                data,
                self.columns,
                config.packing,
                depends_on=(weights, context.precision.name, *tempered),
            )
            self.reference = None if self.ref_logprobs.complete else load()

    def complete(self, stop_or_save: Callable[[], None]) -> dict[str, Dataset]:
        """The data with log-probs of the reference, [n, 2], which is dropped."""
        if not self.config.needs_reference:
            return self.data
        if self.reference is not None:
            self.ref_logprobs.compute(self.reference, stop_or_save)
            self.reference = None
            # A model that is spread over processes refers to itself.
            gc.collect()
        return self.ref_logprobs.added_to_data()

    def rows(
        self,
        examples: Examples,
        responses: Sequence[Sequence[list[int]]],
        response_tensors: dict[str, Tensor],
    ) -> list[PreferenceRow]:
        """Packed rows. response_tensors: [P, K] each, of the whole batch."""
        rows = pack(examples["prompt_ids"], responses, self.config.packing)
        parts = (
            {name: values[list(row.groups)] for name, values in response_tensors.items()}
            for row in rows
        )
        return [
            PreferenceRow(**vars(row), response_tensors=tensors)
            for row, tensors in zip(rows, parts, strict=True)
        ]

    def loss(self, model: nn.Module, row: PreferenceRow, divisor: float | Tensor) -> LossAndMetrics:
        def head_loss(hidden: Tensor, head: Head) -> LinearLossOutput:
            return linear_loss(
                hidden,
                head,
                row.labels,
                row.cu_seqlens_on_host,
                partial(self.sums, self.config),
                responses_per_group=row.responses_per_prompt or 1,
                response_tensors=row.response_tensors,
                divisor=divisor,
            )

        return model(row, row.labeled_at, head_loss)

    def count(self, row: PreferenceRow) -> int:
        """Pairs, or single responses."""
        return len(row.groups)


class PreferencePairs(Preferences):
    """A chosen and a rejected response to each prompt, which they share in the row."""

    load_examples = staticmethod(load_preferences)
    sums = staticmethod(fixed_pair_sums)
    columns = (("chosen_ids", "rejected_ids"),)

    def pack(self, examples: Examples) -> list[PreferenceRow]:
        responses = list(zip(examples["chosen_ids"], examples["rejected_ids"], strict=True))
        rewards = torch.tensor([[1.0, 0.0]]).expand(len(responses), 2)
        tensors = {"rewards": rewards, "loss_mask": torch.ones(rewards.shape, dtype=torch.bool)}
        if self.config.needs_reference:
            tensors["ref"] = torch.tensor(examples["reference"])
        return self.rows(examples, responses, tensors)


class UnpairedPreferences(Preferences):
    """KTO's single responses, each desirable or not. Its reference point z0 is the mean of log
    π/π_ref over a batch's prompts with a response to another prompt, always the same one, so that
    the reference is asked once.
    """

    load_examples = staticmethod(load_unpaired_preferences)
    sums = staticmethod(kto_sums)
    columns = (("response_ids",), ("mismatched_ids",))

    def set_up(self, context: Context, model: PackedModel, data: dict[str, Dataset]) -> None:
        extended = {}
        for flag, examples in data.items():
            others = with_other_prompts(examples["prompt_ids"])
            if others is None:
                raise UserError(
                    f"--{flag}: KTO needs two different prompts at least, for z0, and all are the same"
                )
            responses = examples.data.column("response_ids").take(pa.array(others))
            fingerprint = examples._fingerprint
            extended[flag] = examples.add_column(
                "mismatched_ids", responses, new_fingerprint=fingerprint
            )
        super().set_up(context, model, extended)

    def pack(self, examples: Examples) -> list[PreferenceRow]:
        response_tensors = {
            "ref": torch.tensor(examples["reference"])[:, :1],
            "desirable": torch.tensor(examples["desirable"])[:, None],
        }
        return self.rows(examples, [[ids] for ids in examples["response_ids"]], response_tensors)

    @torch.no_grad()
    def prepare(
        self, model: nn.Module, rows: list[PreferenceRow], examples: Examples
    ) -> list[PreferenceRow]:
        """Rows with z0 and the share of their kind, desirable or not, both of the whole batch: [P,
        1].
        """
        device = self.context.device
        responses = [[ids] for ids in examples["mismatched_ids"]]
        reference = torch.tensor(examples["reference"])[:, 1:]
        desirable = torch.tensor(examples["desirable"])
        on_host = (
            tuple(pack(examples["prompt_ids"], responses, self.config.packing)),
            reference,
            desirable,
        )
        mismatched, reference, desirable = to_device(on_host, device)
        token_logprobs = map_rows_in_lockstep(mismatched, partial(labeled_logprobs, model))
        log_ratios = sums_by_group(mismatched, token_logprobs) - reference
        sums = torch.stack(
            [log_ratios.sum(), desirable.sum().float(), log_ratios.new_full((), len(desirable))]
        )
        sums = self.context.accelerator.reduce(sums, "sum")
        log_ratio, share = sums[:2] / sums[2]
        reference_point = kto_reference_point(log_ratio, torch.zeros_like(log_ratio))
        prepared = []
        for row in rows:
            row = row.to(device)
            is_desirable = row.response_tensors["desirable"]
            values = {
                "reference_point": reference_point.expand(is_desirable.shape),
                "share": torch.where(is_desirable, share, 1 - share),
            }
            prepared.append(replace(row, response_tensors=row.response_tensors | values))
        return prepared


def with_other_prompts(prompts: Sequence[list[int]]) -> list[int] | None:
    """Returns for each example the number of the last one before it, around the end, that has
    another prompt.
    """
    last = next((n for n in reversed(range(len(prompts))) if prompts[n] != prompts[0]), None)
    if last is None:
        return None
    others, before = [], prompts[0]
    for number, prompt in enumerate(prompts):
        if prompt != before:
            last = number - 1
        others.append(last)
        before = prompt
    return others


# --- evaluations ----------------------------------------------------------------------------------


def sampled_evaluation(
    context: Context, config: PreferenceConfig, model: PackedModel, reference: Reference
) -> Evaluation:
    """Builds an evaluation of sampled responses, as the online loop has. model: not spread over
    processes yet.
    """
    load_with_columns = partial(load_prompts, **asked_of_evaluations(config))
    held_out = load_held_out(context, config, load_with_columns, config.eval_prompts)
    rewards = load_rewards(
        context, config, config, held_out.examples, held_out.examples, continues=config.resume
    )
    # Every evaluation comes after other steps.
    sampled = sampled_model(config, model, context, version=count().__next__)
    sampler = policy_sampler(config, sampled, context, config.rollout_batch_size)
    data, packing = held_out.examples, config.packing
    rewards, rival = with_rival(context, config, rewards, data)
    common = (
        context.accelerator,
        model,
        reference,
        sampler,
        rewards,
        data,
        packing,
        1,
        config.seed,
    )
    return Evaluation(*common, held_out.sets, rival=rival)
