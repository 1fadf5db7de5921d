"""Models and a batch for the tests of `expose_head`; as a program, gradients of two processes.

torchrun --nproc_per_node 2 tests/kernels/exposed_heads.py FOLDER
"""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
)

from fastp3o_kernels import expose_head, linear_logprobs, linear_p3o_loss, response_tokens

# The wrapper, the kind of model, and how far gradients may be from those of one process in fp32.
WRAPPERS = {
    "ddp": ("llama", 1e-5),
    "fsdp": ("llama", 1e-5),
    "fsdp, checkpoints": ("llama", 1e-5),
    "fsdp, head alone": ("llama", 1e-5),
    "fsdp, norm and head": ("llama", 1e-5),  # as accelerate groups them
    "fsdp, tied": ("tied llama", 1e-5),
    "fsdp, bf16": ("llama", 0.05),
}
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 40,
    "pad_token_id": 0,
}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 32}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, intermediate_size=24),
    "tied llama": lambda: LlamaConfig(**SIZES, intermediate_size=24, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(**SIZES, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "gemma2": lambda: Gemma2Config(
        **SIZES,
        intermediate_size=24,
        head_dim=8,
        num_key_value_heads=1,
        final_logit_softcapping=2.0,
    ),
    "granite": lambda: GraniteConfig(**SIZES, intermediate_size=24, logits_scaling=3.0),
    "cohere": lambda: CohereConfig(**SIZES, intermediate_size=24, logit_scale=0.3),
}
IDS = torch.randint(3, 40, (8, 9), generator=torch.Generator().manual_seed(0))
IDS[1::2, :4] = IDS[::2, :4]
MASK = torch.arange(9)[None] >= 4
MASK = MASK & (torch.arange(9)[None] < torch.tensor([9, 6, 8, 9, 5, 7, 9, 9])[:, None])
REWARDS = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))


def tiny_causal_lm(name: str) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]()).float()


def p3o_of(groups: slice):
    """The function of hidden states and head, for some prompts of the batch."""
    rows = slice(2 * groups.start, 2 * groups.stop)
    tokens = response_tokens(IDS[rows], MASK[rows], responses_per_prompt=2)
    old = torch.full((groups.stop - groups.start, 2), -15.0)

    def loss(hidden, head):
        given = hidden.flatten(0, 1)[tokens.predicted_at], head, tokens.labels, tokens.cu_seqlens
        return linear_p3o_loss(*given, old, old, REWARDS[groups]).loss

    return {"input_ids": IDS[rows], "attention_mask": torch.ones_like(IDS[rows]), "head_loss": loss}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp, checkpoints":
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    param_dtype = torch.bfloat16 if kind == "fsdp, bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    if kind == "fsdp, head alone":
        fully_shard(model.lm_head, mp_policy=policy)
    if kind == "fsdp, norm and head":
        fully_shard([model.model.norm, model.lm_head], mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def gradients_of_two(folder: Path) -> None:
    """Each process takes two of the four prompts, one at a time. FOLDER gets a file of each
    wrapper's gradients.
    """
    dist.init_process_group("gloo")
    for kind, (name, _) in WRAPPERS.items():
        gradients_of_one(kind, name, folder)
    # Wrapped models hold the group, in circles: what is left of them ends it while threads of it
    # still run.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def gradients_of_one(kind: str, name: str, folder: Path) -> None:
    rank = dist.get_rank()
    model = wrapped(kind, expose_head(tiny_causal_lm(name)))
    for groups in (slice(2 * rank, 2 * rank + 1), slice(2 * rank + 1, 2 * rank + 2)):
        (model(**p3o_of(groups)) / 2).backward()
    whole = {
        name.removeprefix("module."): getattr(
            gradient, "full_tensor", lambda gradient=gradient: gradient
        )()
        for name, gradient in gradients(model).items()
    }
    if rank == 0:
        save_file(whole, folder / f"{kind}.safetensors")
    if kind == "fsdp":
        weight = model.lm_head.weight
        refused(weight, folder / f"a part refused by {rank}")
        refused(
            weight.full_tensor().to(torch.bfloat16).float(), folder / f"gathered refused by {rank}"
        )
        gathered = weight.full_tensor(grad_placements=[Partial("avg")])
        weight.grad = None
        # Each process has different tokens.
        labels = torch.tensor([3 + rank])
        linear_logprobs(torch.ones(1, 16), gathered, labels).sum().backward()
        save_file({"head": weight.grad.full_tensor()}, folder / f"gathered by {rank}.safetensors")


def refused(weight: torch.Tensor, path: Path) -> None:
    try:
        linear_logprobs(torch.zeros(1, 16), weight, torch.zeros(1, dtype=torch.long))
    except ValueError as error:
        path.write_text(str(error))


if __name__ == "__main__":
    gradients_of_two(Path(sys.argv[1]))
