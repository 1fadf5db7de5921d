"""Short runs of PairsTrainer; as a program, in each of two processes with uneven shares.

torchrun --nproc_per_node 2 tests/fastp3o/integrations/pairs_runs.py FOLDER MODEL
"""

import sys

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, TrainingArguments

from fastp3o.integrations import pairs_trainer
from fastp3o.integrations.pairs_trainer import PairsCollator, PairsTrainer, with_logprobs
from fastp3o_kernels import P3OSettings, expose_head
from tests.fastp3o.integrations.own_trainer import leave, plain_descent, recorded

GENERATOR = torch.Generator().manual_seed(0)


def ids(most: int) -> list[int]:
    length = int(torch.randint(1, most, (), generator=GENERATOR))
    return torch.randint(2, 258, (length,), generator=GENERATOR).tolist()


RECORDS = [
    {
        "prompt_ids": ids(9),
        "response_ids": [ids(7), ids(7)],
        "rewards": torch.randn(2, generator=GENERATOR).tolist(),
        "labels": [1, 2, 3],
    }
    for _ in range(5)
]


class Uneven(PairsTrainer):
    """The first process has three of five records, in microbatches of two and one; the second has the other two."""

    def get_train_dataloader(self):
        shares = ([[0, 1], [2]], [[3], [4]])
        batches = shares[self.accelerator.process_index]
        return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)


def pairs(
    folder: str, model_name: str, change=lambda model: model, trainer_class=PairsTrainer, **options
) -> PairsTrainer:
    """Five records in microbatches of two: the last one of an epoch is alone."""
    model = expose_head(AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32))
    collator = PairsCollator(pad_token_id=1)
    settings = {
        "output_dir": folder,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "use_cpu": True,
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 2,
    }
    args = TrainingArguments(**(settings | options))
    dataset = Dataset.from_list(RECORDS)
    for name in ("old_logprobs", "ref_logprobs"):
        dataset = with_logprobs(dataset, model, collator, name, args, batch_size=2)
    model = change(model)
    trainer = trainer_class(
        model,
        args,
        settings=P3OSettings(),
        data_collator=collator,
        train_dataset=dataset,
        optimizers=plain_descent(model),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    folder, model_name = sys.argv[1:]
    microbatches = recorded(pairs_trainer)
    options = {"gradient_accumulation_steps": 2, "num_train_epochs": 1}
    leave(folder, "pairs", pairs(folder, model_name, trainer_class=Uneven, **options), microbatches)
