"""Predicts the GPU memory of P3O's passes for a model and mean lengths, from only its
configuration.

fastp3o memory --model MODEL --prompt_tokens 350 --response_tokens 40 --precision fp16
"""

import sys
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Column, Table

from fastp3o.cli import parse
from fastp3o.config import TrainableConfig, option, required
from fastp3o.errors import UserError
from fastp3o.packing.settings import Packing

if TYPE_CHECKING:
    from fastp3o.models.packed_model import PackedModel
    from fastp3o.training.predicted_memory import Lengths, Memory, Model

CONTEXT = 1.5  # GB of CUDA's context, workspaces of cuBLAS and NCCL, and fragments; estimated, not measured
NOTE = """\
peak = the sum, with the larger of head and layer only; where embeddings need more than these and
activations, they count instead. others = the model that waits: the reference, which --offload, LoRA and
--kl_coef 0 save, or the policy; and a judge. A reward model of its own comes on top of that. With
--rollout_memory, or less free memory, rollouts cache less. LoRA's rollouts on one GPU are faster with
room for a second copy of the weights, which is not counted."""
PHASES = ("policy's update", "reference's pass", "rollouts")
QUESTION = 200  # tokens around what a judge compares, by the template without principles


class MemoryConfig(TrainableConfig):
    """Predicts the GPU memory of P3O's passes for a model and mean lengths; reads only the model's
    configuration.
    """

    model: str = required(
        "Model: a Hugging Face causal LM, as a hub name or a folder; only its configuration is read."
    )
    prompt_tokens: int = option(350, "Mean length of a prompt, in tokens.", at_least=1)
    response_tokens: int = option(40, "Mean length of a response, in tokens.", at_least=1)
    responses_per_prompt: int = option(2, "Responses to each prompt.", at_least=1)
    tokens_per_row: int = option(
        8192, "Tokens of a packed row, prompts included, as in training.", at_least=1
    )
    share_prompts: bool = option(
        True, "Compute each prompt once, and share it among its responses, as in training."
    )
    precision: Literal["fp32", "bf16-autocast", "bf16", "fp16"] = option(
        "fp16",
        "Arithmetic as in training: fp32, bf16-autocast (fp32 weights, computed in bf16), or half-precision weights "
        "in bf16 or fp16. In training, auto takes fp16 unless a trial overflows, and bf16-autocast then.",
    )
    gradient_checkpointing: bool = option(
        False, "Recompute activations in the backward pass, as in training."
    )
    max_prompt_tokens: int = option(
        512, "Maximum length of a prompt in rollouts, in tokens.", at_least=1
    )
    max_response_tokens: int = option(
        128, "Maximum length of a response in rollouts, in tokens.", at_least=1
    )
    rollout_batch_size: int = option(64, "Prompts sampled at once on one device.", at_least=1)
    optimizer: Literal["adamw", "adamw_8bit"] = option(
        "adamw", "Optimizer as in training. adamw: moments in fp32. adamw_8bit: moments in 8 bits."
    )
    offload: bool = option(False, "Keep the reference on the CPU between uses, as in training.")
    kl_coef: float = option(
        0.05, "Weight of the KL as in training; with 0 there is no reference.", at_least=0
    )
    judge_model: str | None = option(
        None,
        "Language model that judges on this machine, as with --reward judge in training: a folder or hub name; only "
        "its configuration is read. Default: none.",
    )
    rival: str | None = option(
        None,
        "Model that --rival names in training, a folder or hub name; only its configuration is read. Default: none.",
    )
    gpu_gb: float = option(
        0.0,
        "Memory of each GPU, in GB: the head takes a twentieth of it for logits. 0: at most 19.",
        at_least=0,
    )
    gpus: int = option(1, "GPUs that train together; the table is for each of them.", at_least=1)
    shard_size: int = option(
        0,
        "GPUs that hold one copy of the model, or of its tensor-parallel part, together; 0: all.",
        at_least=0,
    )
    tensor_parallel: int = option(
        1, "GPUs that compute each layer together; 1 disables it.", at_least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantize:
            raise UserError("--quantize: the memory of quantized bases is not predicted")
        if self.gpus % (self.shards * self.tensor_parallel):
            raise UserError(
                f"--shard_size times --tensor_parallel must divide --gpus ({self.gpus})"
            )

    @property
    def shards(self) -> int:
        return self.shard_size or max(1, self.gpus // self.tensor_parallel)


def main() -> None:
    config = parse(MemoryConfig)
    # These take seconds, which --help does without.
    import torch

    from fastp3o.models.trainable import choose_trainable
    from fastp3o.training.predicted_memory import Lengths, Model

    policy = on_meta(config.model)
    with torch.device("meta"):
        choose_trainable(policy, config)
    lengths = Lengths.full_row(
        Packing(config.tokens_per_row, config.share_prompts),
        prompt=config.prompt_tokens,
        response=config.response_tokens,
        responses_per_prompt=config.responses_per_prompt,
    )
    phases = phases_of(config, Model(policy, config.trainable_layers), lengths)
    each = f" on each of {config.gpus} GPUs" if config.gpus > 1 else ""
    columns = (Column(name, justify="right") for name in phases)
    title = f"{config.model}: GB{each}, {lengths.tokens} tokens a row, {lengths.labeled} of them labeled"
    table = Table("", *columns, title=title)
    for name in (*vars(phases[PHASES[0]]), "peak"):
        table.add_row(name, *(f"{getattr(memory, name) / 1e9:.2f}" for memory in phases.values()))
    table.add_row("and about, for CUDA", *len(phases) * [f"{CONTEXT:.2f}"])
    Console().print(table)
    print(NOTE)
    if config.gpu_gb:
        needed = max(memory.peak for memory in phases.values()) / 1e9 + CONTEXT
        does = "fits" if needed <= config.gpu_gb else "does not fit"
        print(f"{needed:.1f} GB at most: this {does} into {config.gpu_gb:g} GB.")


def on_meta(name: str) -> "PackedModel":
    """A causal LM of this configuration, without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from fastp3o.models.checkpoint_files import errors_naming
    from fastp3o.models.packed_model import PackedModel

    with errors_naming(name):
        architecture = AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        return PackedModel(AutoModelForCausalLM.from_config(architecture))


def phases_of(config: MemoryConfig, model: "Model", lengths: "Lengths") -> "dict[str, Memory]":
    """The update, the reference's pass and rollouts, and those of a judge and a rival, by their
    names, each with what waits beside it.
    """
    from fastp3o.rollouts.cache import fitting_room
    from fastp3o.runtime.precision import choose_precision
    from fastp3o.training.predicted_memory import (
        Model,
        frozen_memory,
        rollout_memory,
        sharded,
        together,
        update_memory,
    )
    from fastp3o_kernels.head.chunks import budget_of

    precision = choose_precision(config.precision, config.precision)
    part, budget = model.cut(config.tensor_parallel), budget_of(int(config.gpu_gb * 1e9))
    saves: dict[str, Any] = {
        "checkpointing": config.gradient_checkpointing,
        "optimizer": config.optimizer,
    }
    update = update_memory(part, lengths, precision, **saves, budget=budget)
    frozen = frozen_memory(part, lengths, precision, budget=budget)
    adapters = config.lora_rank > 0
    room = fitting_room(
        config.max_prompt_tokens - 1,
        config.max_response_tokens,
        config.responses_per_prompt,
        prompts=config.rollout_batch_size,
        bytes_per_token=1,
        memory=sys.maxsize,
    )
    rollouts = rollout_memory(model, room, precision, shards=config.shards * config.tensor_parallel)
    if config.gpus > 1:
        update, frozen = (
            sharded(memory, part, precision, config.shards) for memory in (update, frozen)
        )
    names, others = [*PHASES], {}
    if config.judge_model:
        judge = Model(on_meta(config.judge_model)).cut(config.tensor_parallel)
        others["judge"] = frozen_memory(judge, questions(config), precision, budget=budget)
        if config.gpus > 1:
            others["judge"] = sharded(others["judge"], judge, precision, config.shards)
        names.append("judge's pass")
    if config.rival:
        shards = config.shards * config.tensor_parallel
        others["rival"] = rollout_memory(
            Model(on_meta(config.rival)), room, precision, shards=shards
        )
        names.append("rival's rollouts")
    second = config.kl_coef > 0 and not adapters
    phases = together(update, frozen, rollouts, second=second, offload=config.offload, **others)
    return dict(zip(names, phases, strict=True))


def questions(config: MemoryConfig) -> "Lengths":
    """A row filled with questions to a judge, each with a prompt, two responses to it, and two
    letters as answers.
    """
    from fastp3o.training.predicted_memory import Lengths

    asked = QUESTION + config.prompt_tokens + 2 * config.response_tokens
    return Lengths.full_row(
        Packing(config.tokens_per_row, config.share_prompts), prompt=asked, response=1
    )
