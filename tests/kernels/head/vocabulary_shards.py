"""The head's rows on two and on three processes, against the whole head.

torchrun --nproc_per_node 3 tests/kernels/head/vocabulary_shards.py
"""

import gc
from copy import copy
from dataclasses import replace
from itertools import product
from math import inf, nan
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastp3o_kernels import Head, VocabularyShard, linear_distillation, linear_logprobs
from tests.kernels.levels import Batch
from tests.kernels.problems import budget_for, multiplied_as

LOSSES = [("hidden", clipping) for clipping in ("joint", "separate", "none", "token")]
LOSSES += [(level, "separate") for level in ("hidden, its own", "objective", "log-probs", "log-probs, outputs")]
# How each dtype is multiplied, and how exact gradients are beside those of eager PyTorch.
ARITHMETICS = [
    *[(torch.float64, "widened", None, 1e-12), (torch.float32, "widened", None, 1e-5)],
    *[(torch.float32, "widened", "triton", 1e-5), (torch.bfloat16, "widened", None, 1e-4)],
    *[(half, "gpu", impl, 1e-4) for half in (torch.bfloat16, torch.float16) for impl in (None, "triton")],
]


def part_of(batch: Batch, group: dist.ProcessGroup | None) -> tuple[Batch, slice]:
    """The same batch with this process's rows of the head."""
    states, widest = batch.states, -(-len(batch.states.weight) // dist.get_world_size(group))
    shard = VocabularyShard(group, len(states.weight), dist.get_rank(group) * widest, widest)
    rows = slice(shard.first, shard.first + shard.rows)
    bias = None if states.bias is None else states.bias[rows]
    part = copy(batch)
    part.states = replace(states, weight=states.weight[rows], bias=bias, shard=shard)
    return part, rows


def check_loss(group, level: str, clipping: str, dtype, arithmetic: str, impl: str | None, share: float) -> None:
    random = Random(f"{level} {clipping} {dtype} {arithmetic} {impl} {dist.get_world_size(group)}")
    K, V = random.choice([2, 3]), random.choice([31, 50, 67])
    head = {"bias": random.random() < 0.5, "softcap": random.choice([None, 5.0]), "seed": random.randrange(10**6)}
    head |= {"temperature": random.choice([1.0, 0.7])}
    lengths = [random.randrange(4 if impl else 13) for _ in range(4 * K)]  # the interpreter is slow
    batch = Batch(level, lengths, V, K=K, dtype=dtype, clipping=clipping, masked=random.random() < 0.5, **head)
    if level.startswith("log-probs"):
        batch.pairs.labels[::7] = -100
    if dtype == torch.float64:
        batch = batch.to(dtype)
    expected, targets = batch.to(torch.float64).run("eager")
    with multiplied_as(arithmetic, dtype):
        eager, by_eager = batch.run("eager")
        part, rows = part_of(batch, group)
        budget = budget_for(random.choice([3, 20, 1000]), part.states.shard.widest)
        output, gradients = part.run(impl, memory_budget=2 * budget)
    size = share * (1 + abs(expected.loss))
    assert abs(output.loss - expected.loss) <= 4 * abs(eager.loss - expected.loss) + size
    torch.testing.assert_close(output.metrics, eager.metrics, rtol=max(10 * share, 1e-11), atol=max(10 * share, 1e-11))
    for got, other, target, own in zip(gradients, by_eager, targets, (slice(None), rows, rows), strict=False):
        error, least = (got - target[own]).norm(), (other - target)[own].norm()
        assert error <= 3 * least + share * (1 + target.norm()), (error, least)
    values: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, [output.loss.item(), *map(Tensor.tolist, output.metrics.values())], group)
    assert all(repr(value) == repr(values[0]) for value in values)  # to the bit, NaN too


def check_what_is_not_finite(group, impl: str | None) -> None:
    """A part without any logit but -inf, NaN in one part, and a largest logit that is in two of them."""
    batch = Batch("log-probs, outputs", [12, 12], 31, bias=True, dtype=torch.float32 if impl else torch.float64)
    states, labels = batch.states, batch.pairs.labels
    states.bias[:16], states.weight[-1] = -inf, states.weight[-2]
    states.bias[-2:] = 50.0
    labels[:4] = torch.tensor([29, 30, 2, -100])
    for spoilt in (None, 20, 30):
        if spoilt is not None:
            states.bias[spoilt] = nan
        part, rows = part_of(batch, group)
        (expected, targets), (output, gradients) = batch.run("eager"), part.run(impl)
        size = 1e-5 if impl else 1e-12
        torch.testing.assert_close(output.metrics, expected.metrics, rtol=size, atol=size, equal_nan=True)
        assert output.metrics["is_top"][:2].tolist() == 2 * [spoilt is None]
        torch.testing.assert_close(
            gradients, [targets[0], targets[1][rows], targets[2][rows]], rtol=size, atol=size, equal_nan=True
        )


def check_what_is_sent(group, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, reduce = [], dist.all_reduce

    def counted(values: Tensor, op=dist.ReduceOp.SUM, group=None) -> None:
        sent.append((str(op), *values.shape))
        reduce(values, op, group)

    monkeypatch.setattr(dist, "all_reduce", counted)
    part, _ = part_of(Batch("hidden", [3, 4, 9, 2]), group)
    part.run(None)
    assert sent == [("RedOpType.MAX", 18), ("RedOpType.SUM", 2, 18), ("RedOpType.SUM", 18, 8)]


def check_what_is_refused(group) -> None:
    part, _ = part_of(Batch("hidden", [3, 4]), group)
    hidden, head, labels = part.states.hidden, part.states.head, part.pairs.labels
    with pytest.raises(ValueError, match='impl="eager" takes a whole head'):
        part.run("eager")
    with pytest.raises(ValueError, match="takes whole heads"):
        linear_distillation(hidden, head, hidden, head)
    with pytest.raises(ValueError, match="must be from 0 to 49"):
        linear_logprobs(hidden, head, labels + 50)
    with pytest.raises(ValueError, match="rows of its shard, got 1"):
        linear_logprobs(hidden, Head(head.weight[:1], shard=head.shard), labels)
    with pytest.raises(ValueError, match="must all have rows of a vocabulary of 4"):
        VocabularyShard(group, 4, 0, 4)


def main() -> None:
    dist.init_process_group("gloo")
    two = dist.new_group([0, 1])
    for group in (None, two):
        if group is two and dist.get_rank() == 2:
            continue
        impls = (None, "triton") if group is two else (None,)
        for loss, arithmetic in product(LOSSES, ARITHMETICS):
            if arithmetic[2] in impls:
                check_loss(group, *loss, *arithmetic)
        for impl in impls:
            check_what_is_not_finite(group, impl)
        with pytest.MonkeyPatch.context() as monkeypatch:
            check_what_is_sent(group, monkeypatch)
        check_what_is_refused(group)
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
