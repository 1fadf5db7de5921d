"""KTO's data: single responses, each desirable or not, and what its reference point z0 is measured on."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pyarrow as pa
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn

from fastp3o.data import load_unpaired_preferences
from fastp3o.models.packed_model import scored_logprobs
from fastp3o.models.sharding import passes
from fastp3o.packing.pack import by_group, pack
from fastp3o.stages.preference.task import PreferenceRow, Preferences
from fastp3o.stages.setup import Setting
from fastp3o.training.order import Examples
from fastp3o_kernels import sequence_logprobs
from fastp3o_kernels.losses import kto_reference_point


class UnpairedPreferences(Preferences):
    """Each prompt has the response to another one too, always the same, so that the reference is asked once: z0 is the
    mean of log π/π_ref over those of a batch.
    """

    load_examples = staticmethod(load_unpaired_preferences)
    columns = (("response_ids",), ("mismatched_ids",))

    def set_up(self, setting: Setting, data: dict[str, Dataset]) -> None:
        super().set_up(setting, {name: with_mismatched(examples, name) for name, examples in data.items()})

    def pack(self, examples: Examples) -> list[PreferenceRow]:
        responses = [[ids] for ids in examples["response_ids"]]
        of_batch = {
            "reference": torch.tensor(examples["reference"])[:, :1],
            "desirable": torch.tensor(examples["desirable"])[:, None],
        }
        rows = pack(examples["prompt_ids"], responses, self.config.packing)
        return [PreferenceRow.of(row, of_batch) for row in rows]

    @torch.no_grad()
    def prepare(
        self, accelerator: Accelerator, model: nn.Module, rows: list[PreferenceRow], examples: Examples
    ) -> list[PreferenceRow]:
        """Rows with z0 and the share of their kind of responses, both of the whole batch: [P, 1]."""
        responses = [[ids] for ids in examples["mismatched_ids"]]
        mismatched = pack(examples["prompt_ids"], responses, self.config.packing)
        mismatched = [row.to(accelerator.device) for row in mismatched]
        logprobs = [
            sequence_logprobs(token_logprobs, row.cu_seqlens)
            for row, token_logprobs in zip(mismatched, passes(mismatched, partial(scored_logprobs, model)), strict=True)
        ]
        log_ratios = by_group(mismatched, logprobs).cpu() - torch.tensor(examples["reference"])[:, 1:]
        desirable = torch.tensor(examples["desirable"])
        sums = torch.stack([log_ratios.sum(), desirable.sum(), torch.tensor(len(desirable))])
        sums = accelerator.reduce(sums.to(accelerator.device), "sum").cpu()
        log_ratio, share = sums[:2] / sums[2]
        reference_point = kto_reference_point(log_ratio, torch.zeros(()))
        return [with_batch_values(row, reference_point, share) for row in rows]


def with_batch_values(row: PreferenceRow, reference_point: Tensor, share: Tensor) -> PreferenceRow:
    """share: of desirable responses."""
    desirable = row.of_responses["desirable"]
    values = {
        "reference_point": reference_point.expand(desirable.shape),
        "share": torch.where(desirable, share, 1 - share),
    }
    return replace(row, of_responses=row.of_responses | values)


def with_mismatched(examples: Dataset, name: str) -> Dataset:
    """With a column of responses to other prompts. Raises ValueError where all prompts are the same."""
    others = with_other_prompts(examples["prompt_ids"])
    if others is None:
        raise ValueError(f"--{name}: KTO needs two different prompts at least, for z0, and all are the same")
    responses = examples.data.column("response_ids").take(pa.array(others))
    return examples.add_column("mismatched_ids", responses, new_fingerprint=examples._fingerprint)


def with_other_prompts(prompts: Sequence[list[int]]) -> list[int] | None:
    """For each example the number of the last one before it, around the end, that has another prompt."""
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
