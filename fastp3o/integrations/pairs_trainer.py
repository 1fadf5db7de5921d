"""P3O in transformers' Trainer: a data set of prompts with rewarded responses, its collator, and the loss.

A microbatch has P prompts with K responses each; T positions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, Trainer, TrainingArguments

from fastp3o.integrations.padded_pairs import PaddedBatch, padded_logprobs, padded_p3o_loss
from fastp3o_kernels import P3OSettings

COLUMNS = ("prompt_ids", "response_ids", "rewards", "old_logprobs", "ref_logprobs")


@dataclass(frozen=True)
class PairsCollator:
    """Makes a padded batch from records {"prompt_ids": [...], "response_ids": [[...], ...], "rewards": [K]}.

    The end-of-sequence belongs to a response. Records may also have "old_logprobs" and "ref_logprobs" [K]
    (`with_logprobs`). All records have the same K. The batch has input_ids, attention_mask and response_mask,
    [P, K, T] int64, and the others, [P, K] fp32.

    Raises ValueError for a record whose lists disagree, with its index in the batch.
    """

    pad_token_id: int

    def __call__(self, records: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        K = len(records[0]["response_ids"])
        for number, record in enumerate(records):
            lengths = {name: len(record[name]) for name in COLUMNS[1:] if name in record}
            if K < 2 or set(lengths.values()) != {K}:
                raise ValueError(
                    f"record {number} of the batch has lists of {lengths}; each must have one entry for each response, "
                    f"as many as the first record, and 2 or more (there {K})"
                )
            if not record["prompt_ids"]:
                raise ValueError(f"record {number} of the batch has an empty prompt")
        rows = [
            torch.tensor([*record["prompt_ids"], *response])
            for record in records
            for response in record["response_ids"]
        ]
        input_ids = pad_sequence(rows, batch_first=True, padding_value=self.pad_token_id)
        begins = torch.tensor([len(record["prompt_ids"]) for record in records]).repeat_interleave(K)[:, None]
        ends = torch.tensor([len(row) for row in rows])[:, None]
        positions = torch.arange(input_ids.shape[1])
        masks = {"attention_mask": positions < ends, "response_mask": (positions >= begins) & (positions < ends)}
        batch = {"input_ids": input_ids} | {name: mask.long() for name, mask in masks.items()}
        numbers = {name: [record[name] for record in records] for name in COLUMNS[2:] if name in records[0]}
        return {name: values.unflatten(0, (len(records), K)) for name, values in batch.items()} | {
            name: torch.tensor(values).float() for name, values in numbers.items()
        }


def padded_batch(inputs: Mapping[str, Tensor]) -> PaddedBatch:
    """The responses of a collated batch, one to a row."""
    ids, attention_mask, response_mask = (
        inputs[name].flatten(0, 1) for name in ("input_ids", "attention_mask", "response_mask")
    )
    return PaddedBatch(ids, attention_mask, response_mask, inputs["input_ids"].shape[1])


def with_logprobs(
    dataset: Dataset,
    model: PreTrainedModel,
    collator: PairsCollator,
    name: str,
    args: TrainingArguments,
    batch_size: int = 8,
) -> Dataset:
    """The data set with a column of log-probs [K] of each record's responses.

    model: after `expose_head`, before it is in a trainer. Dropout is off during the call.
    name: "old_logprobs" if the model is the policy that sampled, "ref_logprobs" if it is the reference.
    args: the trainer's, whose bf16 and fp16 set the precision here: with another one than the policy's, mere rounding
        would give ratios other than 1.
    """
    dtype = torch.float16 if args.fp16 else torch.bfloat16
    was_training = model.training
    model.eval()

    def logprobs(records: list[dict]) -> list[list[float]]:
        batch = {key: values.to(model.device) for key, values in collator(records).items()}
        with torch.autocast(model.device.type, dtype, enabled=args.bf16 or args.fp16):
            return padded_logprobs(model, padded_batch(batch)).tolist()

    records = dataset.to_list()
    starts = range(0, len(records), batch_size)
    column = [row for start in starts for row in logprobs(records[start : start + batch_size])]
    model.train(was_training)
    return dataset.add_column(name, column)


class PairsTrainer(Trainer):
    """Trainer with P3O's loss. The loss is a mean over an optimizer step's prompts, over all of its microbatches and
    processes, which may be uneven.

        trainer = PairsTrainer(expose_head(model), args, settings=P3OSettings(), data_collator=PairsCollator(pad),
                               train_dataset=with_logprobs(dataset, model, collator, "ref_logprobs", args))

    settings: clipping is "joint", "separate" or "none".
    """

    def __init__(self, model: PreTrainedModel, *arguments: Any, settings: P3OSettings, **options: Any):
        super().__init__(model, *arguments, **options)
        self.settings = settings
        # Trainer then leaves the division by the number of microbatches to the loss.
        self.model_accepts_loss_kwargs = True

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = cast(Any, list(COLUMNS))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """Microbatches of an optimizer step, and the number of prompts in all processes' microbatches."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        prompts = torch.tensor(sum(len(batch["rewards"]) for batch in batches), device=device, dtype=torch.float32)
        return batches, self.accelerator.reduce(prompts, reduction="sum")

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        # Processes' gradients are averaged.
        divisor = None if num_items_in_batch is None else num_items_in_batch / self.accelerator.num_processes
        loss, metrics = padded_p3o_loss(
            model,
            padded_batch(inputs),
            inputs["rewards"],
            self.settings,
            old_logprobs=inputs.get("old_logprobs"),
            ref_logprobs=inputs.get("ref_logprobs"),
            divisor=divisor,
        )
        return (loss, metrics) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        prediction_loss_only: bool,
        ignore_keys: Iterable[str] | None = None,
    ) -> tuple[Tensor, None, None]:
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, cast(dict, self._prepare_inputs(inputs)))
        return loss.detach(), None, None
