"""The head's rows on two and on three processes, each of which runs this file, against the whole
head.
"""

from copy import copy
from dataclasses import replace
from itertools import product
from math import inf, nan
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fastp3o_kernels import VocabularyShard, linear_distillation, linear_logprobs
from tests.fastp3o.together import together
from tests.kernels.levels import FUSED, Batch
from tests.kernels.problems import CLIPPINGS, budget_for, multiplied_as

LOSSES = [
    *product(FUSED[:1], CLIPPINGS),
    *product([*FUSED[1:], "log-probs, outputs"], ["separate"]),
]
DRAWN = {"V": [31, 50, 67], "K": [2, 3], "seed": range(10**6), "masked": [False, True]}
DRAWN |= {"bias": [False, True], "softcap": [None, 5.0], "temperature": [1.0, 0.7]}
# Dtypes, how halves are multiplied, and how exact values and gradients are beside those of eager
# PyTorch.
ARITHMETICS = [
    (torch.float64, "widened", 1e-12),
    (torch.float32, "widened", 1e-5),
    (torch.bfloat16, "widened", 1e-4),
]
ARITHMETICS += [(torch.bfloat16, "gpu", 1e-4), (torch.float16, "gpu", 1e-4)]


def part_of(batch: Batch, group: dist.ProcessGroup) -> tuple[Batch, list[slice]]:
    """The same batch with this process's rows of the head; these rows of the gradients of hidden,
    weight and bias.
    """
    states, widest = batch.states, -(-len(batch.states.weight) // dist.get_world_size(group))
    shard = VocabularyShard(group, len(states.weight), dist.get_rank(group) * widest, widest)
    rows, part = slice(shard.first, shard.first + shard.rows), copy(batch)
    bias = None if states.bias is None else states.bias[rows]
    part.states = replace(states, weight=states.weight[rows], bias=bias, shard=shard)
    return part, [slice(None), rows, rows]


def check_loss(
    group, impl: str | None, level: str, clipping: str, dtype, arithmetic: str, share: float
) -> None:
    random = Random(f"{level} {clipping} {dtype} {arithmetic} {impl} {dist.get_world_size(group)}")
    drawn = {name: random.choice(values) for name, values in DRAWN.items()}
    # Triton's interpreter is slow
    lengths = [random.randrange(3 if impl else 13) for _ in range(12)]
    batch = Batch(level, lengths, dtype=dtype, clipping=clipping, **drawn)
    batch = batch.to(dtype) if dtype == torch.float64 else batch
    if level.startswith("log-probs"):
        batch.pairs.labels[::7] = -100
    expected, targets = batch.to(torch.float64).run("eager")
    with multiplied_as(arithmetic, dtype):
        eager, eager_gradients = batch.run("eager")
        part, rows = part_of(batch, group)
        output, gradients = part.run(
            impl, memory_budget=budget_for(random.choice([5, 40, 2000]), drawn["V"])
        )
    assert abs(output.loss - expected.loss) <= 4 * abs(eager.loss - expected.loss) + share * (
        1 + abs(expected.loss)
    )
    torch.testing.assert_close(output.metrics, eager.metrics, rtol=10 * share, atol=10 * share)
    for got, by_eager, target, own in zip(gradients, eager_gradients, targets, rows, strict=False):
        assert (got - target[own]).norm() <= 3 * (by_eager - target)[own].norm() + share * (
            1 + target.norm()
        )
    everywhere: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(
        everywhere, [value.tolist() for value in (output.loss, *output.metrics.values())], group
    )
    assert all(values == everywhere[0] for values in everywhere)


def check_what_is_not_finite(group, impl: str | None) -> None:
    """A part without any logit but -inf, a largest logit that is in two parts, and NaN in one."""
    batch = Batch(
        "log-probs, outputs",
        [12, 12],
        31,
        bias=True,
        dtype=torch.float32 if impl else torch.float64,
    )
    states, size = batch.states, 1e-5 if impl else 1e-12
    states.bias[:16], states.bias[-2:], states.weight[-1] = -inf, 50.0, states.weight[-2]
    batch.pairs.labels[:4] = torch.tensor([29, 30, 2, -100])
    for spoilt in ([], [20], [20, 30]):
        states.bias[spoilt] = nan
        part, rows = part_of(batch, group)
        (expected, targets), (output, gradients) = batch.run("eager"), part.run(impl)
        expected = (
            expected.metrics,
            [target[own] for target, own in zip(targets, rows, strict=True)],
        )
        torch.testing.assert_close(
            (output.metrics, gradients), expected, rtol=size, atol=size, equal_nan=True
        )


def check_what_is_sent_and_what_is_refused(group, monkeypatch: pytest.MonkeyPatch) -> None:
    part, _ = part_of(Batch("hidden", [3, 4, 9, 2]), group)
    hidden, head, sent, send = part.states.hidden, part.states.head, [], dist.all_reduce
    monkeypatch.setattr(
        dist, "all_reduce", lambda v, *op, **to: (sent.append((*op, *v.shape)), send(v, *op, **to))
    )
    part.run()
    assert sent == [(dist.ReduceOp.MAX, 18), (2, 18), (18, 8)]
    for message, call in {
        'impl="eager" takes a whole head': lambda: part.run("eager"),
        "takes whole heads": lambda: linear_distillation(hidden, head, hidden, head),
        "from 0 to 49": lambda: linear_logprobs(hidden, head, part.pairs.labels + 50),
        "of its shard, got 9": lambda: linear_logprobs(
            hidden, replace(head, weight=head.weight[:9]), part.pairs.labels
        ),
        "not cut into": lambda: replace(head.shard, vocabulary=4, widest=4),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def check_parts_of_a_spread_weight(widths: list[int]) -> None:
    """What torch gives each process of a head is the part that a shard says, uneven parts and tied
    rows too.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("vocabulary",))
    for rows in widths:
        whole = torch.arange(rows * 4.0).view(rows, 4)
        shard = VocabularyShard.of(spread := distribute_tensor(whole, mesh, [Shard(0)]))
        assert shard.vocabulary == rows
        assert torch.equal(spread.to_local(), whole[shard.first : shard.first + shard.rows])
    two_dims = init_device_mesh(
        "cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "vocabulary")
    )
    for message, weight in {
        "must be a DTensor": whole,
        "rows alone are cut": distribute_tensor(whole, mesh, [Shard(1)]),
        "over a mesh of one dimension": distribute_tensor(whole, two_dims, [Replicate(), Shard(0)]),
        "placements": distribute_tensor(whole, mesh, [Replicate()]),
    }.items():
        with pytest.raises(ValueError, match=message):
            VocabularyShard.of(weight)


def test_processes_that_share_the_vocabulary_have_the_whole_heads_losses_and_gradients():
    done = together(Path(__file__), processes=3)
    assert done.returncode == 0, done.stdout


if __name__ == "__main__":
    dist.init_process_group("gloo")
    check_parts_of_a_spread_weight([7, 9, 50])
    two = dist.new_group([0, 1])
    for group, impl in [(dist.group.WORLD, None), (two, None), (two, "triton")][
        : 3 if dist.get_rank() < 2 else 1
    ]:
        for loss, arithmetic in product(
            LOSSES, ARITHMETICS[impl == "triton" :]
        ):  # which has no fp64
            check_loss(group, impl, *loss, *arithmetic)
        check_what_is_not_finite(group, impl)
        with pytest.MonkeyPatch.context() as monkeypatch:
            check_what_is_sent_and_what_is_refused(group, monkeypatch)
    dist.destroy_process_group()
