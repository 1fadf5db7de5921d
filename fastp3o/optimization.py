"""The optimizer and its schedule, the same for every stage."""

import torch
from torch import nn
from transformers import get_scheduler

from fastp3o.config import StageConfig


def make_optimizer(
    model: nn.Module, config: StageConfig, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW over the parameters that train, and the schedule of its learning rate over `steps` optimizer steps."""
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
    schedule = get_scheduler(
        config.lr_schedule, optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=steps
    )
    return optimizer, schedule
