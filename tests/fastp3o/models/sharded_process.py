"""One of two processes that share models: what each case gives, in the file named by the first
argument.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from fastp3o.config import StageConfig, TrainableConfig
from fastp3o.models.loading import load_policy
from fastp3o.models.merging import whole_weights
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.models.sampling_copy import SamplingCopy
from fastp3o.models.sharding import (
    empty,
    is_main_process,
    pad_to_longest_rank,
    process_mesh,
    shard,
    whole,
)
from fastp3o.models.trainable import add_lora, freeze_below
from fastp3o.objectives.ppo import Critic
from fastp3o.optimizer.optimizer import Optimizer
from fastp3o.packing.packed_row import PackedRow
from fastp3o.runtime.precision import choose_precision
from fastp3o_kernels import linear_logprobs
from tests.fastp3o.backward import scaled_backward
from tests.fastp3o.models.model_families import (
    FAMILIES,
    FOURS,
    PAIRS,
    adapted,
    enlarge_trained,
    random_model,
    save_adapter,
)

CPU = torch.device("cpu")
ROWS = [PAIRS.row(), FOURS.row()]  # one for each process
# The first group of each, whole and in as many parts as it has responses.
WHOLE, CUT = ([groups.first_row(tokens) for groups in (PAIRS, FOURS)] for tokens in (1000, 1))


def plain(family: str, **changes) -> PackedModel:
    return PackedModel(random_model(family, **changes))


tied = partial(plain, "llama", tie_word_embeddings=True)


def checkpointed() -> PackedModel:
    model = plain("qwen2").train()
    model.recompute_activations()
    return model


def top_layer() -> PackedModel:
    model = plain("gpt2")
    freeze_below(model, 1)
    return model


def head_alone() -> PackedModel:
    model = plain("llama")
    model.requires_grad_(False)
    model.model.get_output_embeddings().requires_grad_(True)
    return model


def with_critic(**changes) -> PackedModel:
    model = plain("llama", **changes)
    model.critic = Critic(model)
    nn.init.ones_(model.critic.value_head.weight)
    assert not model.critic.body.model.lm_head.weight.requires_grad  # which a critic does not use
    return model


ADAPTED = {
    "LoRA": partial(adapted, "llama"),
    "LoRA of experts": partial(adapted, "qwen3_moe"),
    "LoRA of tied embeddings": partial(
        adapted, "llama", "embed_tokens,q_proj", tie_word_embeddings=True
    ),
}
MODELS = {family: partial(plain, family) for family in FAMILIES} | {
    "tied": tied,
    "checkpointed": checkpointed,
    **ADAPTED,
    "top layer": top_layer,
    "head alone": head_alone,
    "critic": with_critic,
}


def compute_loss(model: PackedModel, row: PackedRow) -> Tensor:
    """The loss of log-probs, and of values if there is a critic."""
    critic = getattr(model, "critic", None)

    def both(hidden: Tensor, head) -> Tensor:
        values = 0.0 if critic is None else critic(row)
        return (linear_logprobs(hidden, head, row.labels) + values).square().mean()

    return model(row, row.labeled_at, both)


def given_by_main(model: PackedModel) -> PackedModel:
    """The other process's share is empty."""
    if not is_main_process():
        empty(model)
    return model


def largest_error(
    make: Callable[[], PackedModel], rows=ROWS, whole_rows=ROWS, tensor_parallel: int = 1
) -> float:
    """Errors of gradients relative to the largest one's norm: sharded, against the mean loss in one
    process. Log-probs have the same bits with and without gradients, and weights those of one
    process.
    """
    alone = make()
    torch.stack([compute_loss(alone, row) for row in whole_rows]).mean().backward()
    expected = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    model, own = given_by_main(make()), rows[dist.get_rank() // tensor_parallel]
    ((row, _),) = pad_to_longest_rank([own], own)
    shard(model, CPU, process_mesh(CPU, tensor_parallel=tensor_parallel))
    assert all(
        torch.equal(whole(model.get_parameter(name)), one) for name, one in alone.named_parameters()
    )
    with torch.no_grad():
        before = labeled_logprobs(model, row)
    assert torch.equal(labeled_logprobs(model, row), before)
    compute_loss(model, row).backward()
    got = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    assert got.keys() == expected.keys()
    norm = max(gradient.norm() for gradient in expected.values())
    return max((got[n] - gradient).norm() / norm for n, gradient in expected.items()).item()


@torch.no_grad()
def merged_alike(make: Callable[[], PackedModel]) -> bool:
    """Whether a model that is spread merges its adapters to the same weights as a whole one, and
    into its copy.
    """
    alone, model = make(), given_by_main(make())
    copy = SamplingCopy(model, CPU, torch.float32, merges=True)
    shard(model, CPU, process_mesh(CPU))
    expected, got = (
        {name: weight for names, weight, _ in whole_weights(one.model, None) for name in names}
        for one in (alone, model)
    )
    with copy.gathered(model):
        copied = dict(copy.model.model.named_parameters(remove_duplicate=False))
        return expected.keys() == got.keys() and all(
            torch.equal(weight, got[name]) and torch.equal(weight, copied.get(name, weight))
            for name, weight in expected.items()
        )


def loaded_adapter(folder: Path) -> bool:
    """Whether a policy from adapters of tied embeddings is the same on both processes once it is
    spread.
    """
    base, name = str(folder / "of tied"), folder / "adapter"
    if is_main_process():
        random_model("llama", tie_word_embeddings=True).save_pretrained(base)
        policy = load_policy(base)
        add_lora(policy, TrainableConfig(lora_rank=3, lora_targets="embed_tokens,q_proj"))
        enlarge_trained(policy)
        save_adapter(policy, name)
        expected = labeled_logprobs(policy, ROWS[0])
    dist.barrier()
    model = load_policy(str(name), trains=True)
    shard(model, CPU, process_mesh(CPU))
    with torch.no_grad():
        got = labeled_logprobs(model, ROWS[0])
    return not is_main_process() or torch.allclose(got, expected, atol=1e-5)


def overflowed(process: int, within: str) -> tuple[bool, float, bool]:
    """A step in fp16 in which one process has non-finite numbers, in its pass or in its part of the
    gradients: whether nothing moved, the loss scale, and whether the next step moves something
    again.
    """
    mesh, precision = process_mesh(CPU), choose_precision("fp16", "fp32")
    config = StageConfig(model="", output_dir="", learning_rate=1e-2)
    optimizer = Optimizer(Accelerator(), given_by_main(tied()), precision, config, 9, mesh=mesh)
    # At this scale nothing else overflows.
    optimizer.guard.set_scale(4.0, finite_steps=0)
    here = dist.get_rank() == process

    def step(*, fails: bool) -> tuple[bool, float]:
        before = {name: whole(tensor).clone() for name, tensor in optimizer.tensors().items()}
        loss = compute_loss(optimizer.model, ROWS[dist.get_rank()])
        scaled_backward(optimizer, loss * 1e7 if fails and within == "pass" else loss)
        if fails and within == "part":
            optimizer.parameters["model.model.norm.weight"].grad.to_local()[0] = float("inf")
        scale = optimizer.step(torch.zeros(()))["loss_scale"].item()
        return any(
            not torch.equal(whole(t), before[name]) for name, t in optimizer.tensors().items()
        ), scale

    step(fails=False)
    moved, scale = step(fails=here)
    return not moved, scale, step(fails=False)[0]


def as_stored(folder: Path, name: str) -> tuple[set[torch.dtype], bool]:
    """A bf16 checkpoint: the main process's dtypes before it is spread, and whether it becomes the
    fp32 model then.
    """
    if is_main_process():
        plain("gemma3" if name == "tied" else "llama").model.bfloat16().save_pretrained(
            folder / name
        )
    dist.barrier()
    wide, stored = (
        load_policy(str(folder / name), trains=True, as_stored=stored) for stored in (False, True)
    )
    if name == "critic":
        wide.critic, stored.critic = Critic(wide), Critic(stored)
    dtypes = {parameter.dtype for parameter in stored.model.parameters()}
    tensors = []
    for model in (wide, stored):
        shard(model, CPU, process_mesh(CPU))
        tensors.append(
            {n: whole(t.detach()) for n, t in [*model.named_parameters(), *model.named_buffers()]}
        )
    same = [
        one.dtype == other.dtype and torch.equal(one, other)
        for one, other in zip(*map(dict.values, tensors), strict=True)
    ]
    return dtypes, all(same) and tensors[0].keys() == tensors[1].keys()


def main(file: Path) -> None:
    accelerator = Accelerator()
    errors = {name: largest_error(make) for name, make in MODELS.items()}
    errors |= {
        f"{name} in parts": largest_error(MODELS[name], CUT, WHOLE)
        for name in ("llama", "checkpointed", "critic")
    }
    results = {"errors": errors}
    cases = [overflowed(process, within) for process in range(2) for within in ("pass", "part")]
    results["overflowed"] = gather_object(cases)
    results["as stored"] = [as_stored(file.parent, name) for name in ("plain", "tied", "critic")]
    results["merged"] = {name: merged_alike(make) for name, make in ADAPTED.items()}
    results["from adapter"] = loaded_adapter(file.parent)
    if accelerator.is_main_process:
        torch.save(results, file)
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
