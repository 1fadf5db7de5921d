"""One of two processes that share compiled models: errors of gradients, in the file named by the first argument."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch._dynamo.utils import counters

from fastp3o.models import packed_model
from fastp3o.models.packed_model import PackedModel, labelled_logprobs
from fastp3o.models.sharding import process_mesh, shard, whole
from tests.fastp3o.models.sharded_process import CPU, MODELS, ROWS, compute_loss, given_by_main

# Traced as for the compiler: compiling takes minutes.
traced = torch.compile(packed_model.eager_forward, dynamic=True, backend="aot_eager")
packed_model.compiled = lambda: traced


def outcome(name: str) -> tuple[float, bool]:
    """The largest error of a gradient relative to the largest one's norm, against plain layers in one process, in the
    second of two passes; and whether log-probs have the same bits with and without gradients.
    """
    alone = MODELS[name]()
    torch.stack([compute_loss(alone, row) for row in ROWS]).mean().backward()
    expected = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    model = MODELS[name]()
    for module in [module for module in model.modules() if isinstance(module, PackedModel)]:
        module.compile_layers()
    shard(given_by_main(model), CPU, process_mesh(CPU))
    torch.compiler.reset()  # layers of both models share their graphs
    counters.clear()
    row = ROWS[dist.get_rank()]
    with torch.no_grad():
        before = labelled_logprobs(model, row)
    same = torch.equal(before, labelled_logprobs(model, row))
    for _ in range(2):
        model.zero_grad()
        compute_loss(model, row).backward()
    got = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    assert got.keys() == expected.keys()
    # A checkpoint around segments one by one is not compiled.
    assert bool(counters["stats"]["unique_graphs"]) == (name != "checkpointed")
    norm = max(gradient.norm() for gradient in expected.values())
    error = max((got[n] - gradient).norm() / norm for n, gradient in expected.items()).item()
    return error, same


def main(file: Path) -> None:
    accelerator = Accelerator()
    results = {name: outcome(name) for name in ("llama", "checkpointed")}
    if accelerator.is_main_process:
        torch.save(results, file)
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
