"""Short runs of P3OTrainer on the tiny model; run as a program, in each of two processes.

torchrun --nproc_per_node 2 tests/fastp3o/integrations/trl_runs.py FOLDER MODEL
"""

import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastp3o.integrations.trl import P3OConfig, P3OTrainer, p3o_trainer
from tests.fastp3o.integrations.own_trainer import leave, plain_descent, recorded, varied

WORDS = ["tree", "house", "river", "cloud", "stone", "apple", "eagle", "ocean"]


def arguments(folder: str) -> dict:
    return {
        "output_dir": folder,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": 4,
        "max_steps": 2,
    }


def parts(model_name: str, prompts: list[dict] | None = None) -> dict:
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
    return {
        "model": model,
        "processing_class": AutoTokenizer.from_pretrained(model_name),
        "train_dataset": Dataset.from_list(prompts or [{"prompt": f"Say {word}:"} for word in WORDS]),
        "optimizers": plain_descent(model),
    }


def p3o(folder: str, model_name: str, trainer_class=P3OTrainer, reward=varied, **options) -> P3OTrainer:
    args = P3OConfig(**(arguments(folder) | {"max_completion_length": 6} | options))
    trainer = trainer_class(reward_funcs=reward, args=args, **parts(model_name))
    trainer.train()
    return trainer


if __name__ == "__main__":
    folder, model_name = sys.argv[1:]
    microbatches = recorded(p3o_trainer)
    trainer = p3o(folder, model_name, gradient_accumulation_steps=2, num_iterations=2, max_steps=4)
    leave(folder, "p3o", trainer, microbatches)
