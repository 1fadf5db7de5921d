"""Short runs of P3OTrainer on the tiny model."""

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastp3o.integrations.trl import P3OConfig, P3OTrainer
from tests.fastp3o.integrations.own_trainer import plain_descent, varied

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


def p3o(folder: str, model_name: str, reward=varied, **options) -> P3OTrainer:
    args = P3OConfig(**(arguments(folder) | {"max_completion_length": 6} | options))
    trainer = P3OTrainer(reward_funcs=reward, args=args, **parts(model_name))
    trainer.train()
    return trainer
