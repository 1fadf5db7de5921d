"""Predicts the GPU memory of P3O's passes for a model and mean lengths, from only its configuration.

fastp3o memory --model MODEL --prompt_tokens 350 --response_tokens 40 --precision fp16
"""

import sys
from dataclasses import replace
from typing import Literal

from rich.console import Console
from rich.table import Column, Table

from fastp3o.cli import parse
from fastp3o.config import TrainableConfig, option, required
from fastp3o.errors import UserError
from fastp3o.packing.settings import Packing

CONTEXT = 1.5  # GB of CUDA's context, workspaces of cuBLAS and NCCL, and fragments; estimated, not measured
NOTE = """\
peak = the sum, with the larger of head and layer only; where embeddings need more than these and
activations, they count instead. Policy and reference both on the GPU need the policy's peak and the
reference's weights; --offload, LoRA and --kl_coef 0 save the latter. Rollouts come before the update,
with its masters and optimizer in memory; with --rollout_memory, or less free memory, they cache less.
Logits count as at most 0.96 GB in the head: a GPU of more than 19 GB takes up to a twentieth of it, and
4 GB, where it is free."""


class MemoryConfig(TrainableConfig):
    """Predicts the GPU memory of P3O's passes for a model and mean lengths; reads only the model's configuration."""

    model: str = required("Model: a Hugging Face causal LM, as a hub name or a folder; only its configuration is read.")
    prompt_tokens: int = option(350, "Mean length of a prompt, in tokens.", at_least=1)
    response_tokens: int = option(40, "Mean length of a response, in tokens.", at_least=1)
    responses_per_prompt: int = option(2, "Responses to each prompt.", at_least=1)
    tokens_per_row: int = option(8192, "Tokens of a packed row, prompts included, as in training.", at_least=1)
    share_prompts: bool = option(True, "Compute each prompt once, and share it among its responses, as in training.")
    precision: Literal["fp32", "bf16-autocast", "bf16", "fp16"] = option(
        "fp16",
        "Arithmetic as in training: fp32, bf16-autocast (fp32 weights, computed in bf16), or half-precision weights "
        "in bf16 or fp16. In training, auto takes fp16 unless a trial overflows, and bf16-autocast then.",
    )
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass, as in training.")
    max_prompt_tokens: int = option(512, "Maximum length of a prompt in rollouts, in tokens.", at_least=1)
    max_response_tokens: int = option(128, "Maximum length of a response in rollouts, in tokens.", at_least=1)
    rollout_batch_size: int = option(64, "Prompts sampled at once on one device.", at_least=1)
    gpus: int = option(1, "GPUs that train together; the table is for each of them.", at_least=1)
    shard_size: int = option(
        0, "GPUs that hold one copy of the model, or of its tensor-parallel part, together; 0: all.", at_least=0
    )
    tensor_parallel: int = option(1, "GPUs that compute each layer together; 1 disables it.", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantize:
            raise UserError("--quantize: the memory of quantized bases is not predicted")
        if self.gpus % (self.shards * self.tensor_parallel):
            raise UserError(f"--shard_size times --tensor_parallel must divide --gpus ({self.gpus})")

    @property
    def shards(self) -> int:
        return self.shard_size or max(1, self.gpus // self.tensor_parallel)


def main() -> None:
    config = parse(MemoryConfig)
    # These take seconds, which --help does without.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from fastp3o.commands.predicted_memory import Lengths, Model, frozen_memory, rollout_memory, sharded, update_memory
    from fastp3o.models.loading import errors_naming
    from fastp3o.models.packed_model import PackedModel
    from fastp3o.models.trainable import choose_trainable
    from fastp3o.precision import choose_precision
    from fastp3o.rollouts.cache import fitting_room

    with errors_naming(config.model):
        architecture = AutoConfig.from_pretrained(config.model)
    with torch.device("meta"):
        policy = PackedModel(AutoModelForCausalLM.from_config(architecture))
        choose_trainable(policy, config)
    model = Model(policy, config.trainable_layers)
    lengths = Lengths.full_row(
        Packing(config.tokens_per_row, config.share_prompts),
        prompt=config.prompt_tokens,
        response=config.response_tokens,
        responses_per_prompt=config.responses_per_prompt,
    )
    precision = choose_precision(config.precision, config.precision)
    part = model.cut(config.tensor_parallel)
    update = update_memory(part, lengths, precision, checkpointing=config.gradient_checkpointing)
    frozen = frozen_memory(part, lengths, precision)
    adapters = config.lora_rank > 0
    room = fitting_room(
        config.max_prompt_tokens - 1,
        config.max_response_tokens,
        config.responses_per_prompt,
        prompts=config.rollout_batch_size,
        bytes_per_token=1,
        memory=sys.maxsize,
    )
    rollouts = rollout_memory(model, room, precision, shards=config.shards * config.tensor_parallel, adapters=adapters)
    if config.gpus > 1:
        update, frozen = (sharded(memory, part, precision, config.shards) for memory in (update, frozen))
        rollouts = replace(rollouts, masters=update.masters, optimizer=update.optimizer)
    each = f" on each of {config.gpus} GPUs" if config.gpus > 1 else ""
    columns = (Column(name, justify="right") for name in ("policy's update", "reference's pass", "rollouts"))
    title = f"{config.model}: GB{each}, {lengths.tokens} tokens a row, {lengths.labelled} of them labelled"
    table = Table("", *columns, title=title)
    for name in (*vars(update), "peak"):
        table.add_row(name, *(f"{getattr(memory, name) / 1e9:.2f}" for memory in (update, frozen, rollouts)))
    table.add_row("and about, for CUDA", *3 * [f"{CONTEXT:.2f}"])
    Console().print(table)
    print(NOTE)
