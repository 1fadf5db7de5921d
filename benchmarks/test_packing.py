"""Forward and backward of one P3O update on padded batches, plain packed rows, and rows that hold
shared prompts once.

    python -m pytest benchmarks/test_packing.py

K responses to each prompt are K / 2 pairs of adjacent ones. Old and reference log-probs and rewards
are given. N labeled tokens and P pairs, of a pass or of the update.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks import padded, training_shapes
from benchmarks.measure import Case, measure
from benchmarks.shapes import DEVICE, DTYPE, dtype_name, typed
from benchmarks.training_shapes import CONFIG, LENGTHS, RESPONSES, random_groups
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.objectives.base import Microbatch
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.objectives.p3o import P3O
from fastp3o.packing.pack import Packing, pack
from fastp3o.packing.packed_row import Ids, PackedRow
from fastp3o_kernels import p3o_loss, sequence_logprobs

OBJECTIVE = P3O(P3OConfig(model="", output_dir="", prompts="", reward=""))


@dataclass
class Update:
    """The passes over all pairs."""

    tokens: int  # computed, padding included
    labeled: int
    rows: list[PackedRow]  # none if it is padded
    # of each pass, weighted to add up to the mean over all pairs
    losses: list[Callable[[], Tensor]]

    def run(self) -> Tensor:
        """Adds to the gradients and returns the loss."""
        total = torch.zeros((), device=DEVICE)
        for forward in self.losses:
            loss = forward()
            loss.backward()
            total += loss.detach()
        return total


def made_up_rollout(sums: Tensor, pairs: Sequence[int], all_pairs: int) -> Tensor:
    """The policy's own log-probs [P, 2] -> old and reference log-probs and rewards, [3, P, 2].

    The pairs moved since the rollout, but within the clip range: all of them have a gradient.
    """
    noise = torch.randn(3, all_pairs, 2, generator=torch.Generator().manual_seed(0))[
        :, list(pairs)
    ].to(sums.device)
    return torch.stack([sums + 0.02 * noise[0], sums + noise[1], noise[2]])


def packed_update(
    policy: PackedModel,
    prompts: list[Ids],
    responses: list[list[Ids]],
    *,
    share_prompts: bool,
    parts: bool = False,
) -> Update:
    packing = Packing(1 if parts else training_shapes.TOKENS_PER_PASS, share_prompts)
    rows = [row.to(DEVICE) for row in pack(prompts, responses, packing)]
    pairs_per_group = len(responses[0]) // 2
    all_pairs = pairs_per_group * len(responses)

    def row_loss(row: PackedRow) -> Callable[[], Tensor]:
        with torch.no_grad():
            logprobs = labeled_logprobs(policy, row)
        sums = sequence_logprobs(logprobs, row.cu_seqlens).view(-1, 2)
        pairs = [
            pairs_per_group * group + pair
            for group in row.groups
            for pair in range(pairs_per_group)
        ]
        old, ref, rewards = made_up_rollout(sums, pairs, all_pairs)
        lengths = row.cu_seqlens.diff()
        moved = ((apart - sums).flatten() / lengths for apart in (old, ref))
        old_tokens, ref_tokens = (logprobs + one.repeat_interleave(lengths) for one in moved)
        microbatch = Microbatch(row, rewards, old_tokens, ref_tokens)
        return lambda: OBJECTIVE.loss(policy, microbatch, all_pairs)[0]

    labeled = sum(len(row.labels) for row in rows)
    return Update(sum(row.tokens for row in rows), labeled, rows, [row_loss(row) for row in rows])


def padded_update(policy: PackedModel, prompts: list[Ids], responses: list[list[Ids]]) -> Update:
    pairs = [pair for group in responses for pair in zip(group[::2], group[1::2], strict=True)]
    prompts = [prompt for prompt, group in zip(prompts, responses, strict=True) for _ in group[::2]]
    passes = padded.split(prompts, pairs, training_shapes.TOKENS_PER_PASS)
    batches = [
        padded.pad([prompts[p] for p in members], [pairs[p] for p in members]) for members in passes
    ]

    def logprobs(batch: padded.Rectangle) -> Tensor:
        with policy.with_own_attention() as model:
            return padded.pair_logprobs(model, batch)

    def batch_loss(batch: padded.Rectangle, members: range) -> Callable[[], Tensor]:
        with torch.no_grad():
            given = made_up_rollout(logprobs(batch), members, len(pairs))
        return lambda: len(members) / len(pairs) * p3o_loss(logprobs(batch), *given).loss

    labeled = sum(len(response) for group in responses for response in group)
    return Update(
        sum(batch.input_ids.numel() for batch in batches),
        labeled,
        [],
        list(map(batch_loss, batches, passes)),
    )


# What the goals are about comes first.
LAYOUTS: dict[str, Callable[..., Update]] = {
    "shared prompts": partial(packed_update, share_prompts=True),
    "padded": padded_update,
    "plain packing": partial(packed_update, share_prompts=False),
    "a response at a time": partial(packed_update, share_prompts=True, parts=True),
}


def random_policy() -> PackedModel:
    """Gradients exist already, as after the first pass of an update: later ones need no memory for
    them.
    """
    torch.manual_seed(0)
    with DEVICE:
        # A model keeps its attention in its configuration.
        model = AutoModelForCausalLM.from_config(deepcopy(CONFIG), dtype=DTYPE)
    policy = PackedModel(model)
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return policy


@pytest.fixture(scope="module")
def policy() -> PackedModel:
    return random_policy()


# The suite fails where fastp3o does.
@pytest.mark.parametrize(
    "layout",
    LAYOUTS,
    ids=lambda layout: layout if layout == "padded" else typed(f"fastp3o {layout}"),
)
@pytest.mark.parametrize("K", RESPONSES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_training(benchmark, policy, layout, K, lengths):
    """The layout is timed in turns with plain packing: `ratio_to_bare` is the time over its time."""
    groups = random_groups(lengths, K)
    update, plain = (LAYOUTS[name](policy, *groups) for name in (layout, "plain packing"))
    shape = (
        sum(map(len, chain.from_iterable(groups[1]))),
        CONFIG.hidden_size,
        CONFIG.vocab_size,
        dtype_name(DTYPE),
    )
    measure(
        benchmark,
        Case(
            "training",
            layout,
            "forward and backward",
            *shape,
            bytes=0,
            operations=0,
            gradient_bytes=0,
        ),
        prepare=lambda: policy.zero_grad(set_to_none=False),
        run=lambda _: update.run(),
        bare=plain.run,
    )
    benchmark.extra_info |= lengths._asdict() | {
        "K": K,
        "tokens": update.tokens,
    }
