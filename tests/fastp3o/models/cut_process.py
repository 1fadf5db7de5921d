"""One of four processes that cut models: errors of gradients, in the file named by the first
argument.
"""

import sys
from functools import partial

import torch
import transformers as hf
from accelerate import Accelerator
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from fastp3o.models import sharding
from fastp3o.models.sharding import process_mesh, shard
from tests.fastp3o.models.model_families import CONFIGS, UNGROUPED, adapted
from tests.fastp3o.models.sharded_process import CPU, ROWS, largest_error, plain, with_critic

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
ODD = {"vocab_size": 51}
CONFIGS["olmo2"] = lambda: hf.Olmo2Config(**UNGROUPED | HEADS)  # norms over all heads
# biases, of the head, too
CONFIGS["phi"] = lambda: hf.PhiConfig(**UNGROUPED | HEADS | ODD, resid_pdrop=0.0)
MODELS = {
    f: partial(plain, f, **HEADS)
    for f in ("qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "gpt_neox", "phi")
} | {
    "odd": partial(plain, "llama", **HEADS | ODD),
    "odd and tied": partial(plain, "llama", tie_word_embeddings=True, **HEADS | ODD),
    "LoRA": partial(adapted, "llama", **HEADS),
    "critic": partial(with_critic, **HEADS),
}


def main(file: str) -> None:
    accelerator = Accelerator()
    # gradients are added up in fp64, too
    sharding.MixedPrecisionPolicy = lambda *_, **__: MixedPrecisionPolicy()
    errors = {
        name: largest_error(lambda m=make: m().double(), tensor_parallel=2)
        for name, make in MODELS.items()
    }
    errors["four"] = largest_error(
        lambda: plain("gpt_neox", num_attention_heads=4).double(), ROWS[:1], ROWS[:1], 4
    )
    shard(odd := MODELS["odd"](), CPU, process_mesh(CPU, tensor_parallel=2))
    # torch errs in rows cut twice
    assert odd.model.lm_head.weight.placements == (Shard(1), Shard(0))
    if accelerator.is_main_process:
        torch.save(errors, file)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
