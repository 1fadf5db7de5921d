"""An update's microbatches, and how far their log-probs are from those of other rows and of what
sampled.
"""

from functools import partial
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from fastp3o.errors import UserError
from fastp3o.models.loading import load_policy
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.models.reference import SecondModel
from fastp3o.objectives.base import Microbatch
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.packing.pack import Packing, pack
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o.rollouts.groups import Group, token_ids
from fastp3o.runtime.shares import Share
from fastp3o.training.logprob_gaps import (
    NOISE_RESPONSES,
    evaluated_again,
    first_responses,
    logprob_metrics,
)
from fastp3o.training.microbatches import (
    Passes,
    add_gradients,
    equal_passes,
    make_microbatches,
    pack_minibatches,
    policy_logprobs,
)
from tests.fastp3o.groups import groups_of_ids, tokenized
from tests.fastp3o.models.model_families import FOURS, PAIRS, logprobs_alone, random_model

P, K = 6, 3


@pytest.mark.parametrize("objective", ["joint", "token"])
def test_microbatches_hold_what_belongs_to_their_groups(objective):
    accelerator, generator = Accelerator(cpu=True), torch.Generator().manual_seed(0)

    def ids() -> list[int]:
        return torch.randint(
            3, 48, (int(torch.randint(1, 9, (), generator=generator)),), generator=generator
        ).tolist()

    response_ids = [[ids() for _ in range(K)] for _ in range(P)]
    rollouts = groups_of_ids([ids() for _ in range(P)], response_ids)
    policy, reference = (PackedModel(random_model(family)) for family in ("llama", "gpt2"))
    rewards = torch.arange(P * K).view(P, K).float()
    rows = pack_minibatches(Share(), rollouts, 2, Packing(30))
    second = SecondModel(reference, accelerator.device, offload=False)
    minibatches = make_microbatches(
        accelerator, partial(policy_logprobs, policy), second, rows, rewards, None
    )
    p3o = P3OConfig(model="m", output_dir="o", prompts="p", reward="r", clipping=objective).build()
    passes = equal_passes(accelerator, minibatches, None, p3o)
    groups = [
        sorted(p for microbatch in minibatch for p in microbatch.row.groups)
        for minibatch in minibatches
    ]
    assert (list(map(len, groups)), sorted(chain.from_iterable(groups))) == (
        [P // 2] * 2,
        list(range(P)),
    )
    for minibatch, (rows, divisor) in zip(minibatches, passes, strict=True):
        assert rows == [(microbatch, True) for microbatch in minibatch]
        tokens = sum(len(microbatch.row.labels) for microbatch in minibatch)
        assert divisor == (tokens if objective == "token" else P // 2)
        for microbatch in minibatch:
            row, groups = microbatch.row, list(microbatch.row.groups)
            assert torch.equal(microbatch.rewards, rewards[groups])
            # Bit for bit what training computes before its first step.
            assert torch.equal(
                microbatch.old_token_logprobs, labeled_logprobs(policy, row).detach()
            )
            assert not microbatch.old_logprobs.requires_grad
    for model, name in ((policy, "old_logprobs"), (reference, "ref_logprobs")):
        with torch.no_grad(), model.with_own_attention() as alone:
            for microbatch in (microbatch for minibatch in minibatches for microbatch in minibatch):
                for sums, p in zip(getattr(microbatch, name), microbatch.row.groups, strict=True):
                    prompt, responses = rollouts[p]
                    expected = [
                        logprobs_alone(alone, prompt.ids, response.ids).sum()
                        for response in responses
                    ]
                    expected = torch.stack(expected)
                    torch.testing.assert_close(sums, expected, atol=1e-4, rtol=1e-5)


def rollouts_and_microbatch(
    model: PackedModel, groups, shift: float = 0.0
) -> tuple[list[Group], Microbatch]:
    """A row that holds all groups but the first, with log-probs of the policy, each sequence's
    moved by `shift`.
    """
    chosen = range(1, len(groups.prompts))
    responses = [groups.responses[p] for p in chosen]
    (row,) = pack([groups.prompts[p] for p in chosen], responses, Packing(1000), groups=chosen)
    with torch.no_grad():
        logprobs = labeled_logprobs(model, row)
    logprobs[row.cu_seqlens[1:].long() - 1] += shift
    rewards = torch.zeros(len(chosen), row.responses_per_prompt)
    return groups_of_ids(groups.prompts, groups.responses), Microbatch(
        row, rewards, logprobs, logprobs
    )


def ratio_noise(model: PackedModel, rollouts: list[Group], microbatch: Microbatch) -> float:
    again = evaluated_again(model, rollouts, microbatch.row)
    return logprob_metrics(rollouts, [microbatch], again)["ratio/noise"].item()


@pytest.mark.parametrize("groups", [PAIRS, FOURS], ids=["pairs", "fours"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_in_fp32_both_ways_agree_and_a_shift_of_all_responses_is_measured_in_nats(family, groups):
    model = PackedModel(random_model(family))
    for shift in (0.0, 0.5):
        noise = ratio_noise(model, *rollouts_and_microbatch(model, groups, shift))
        assert noise == pytest.approx(shift, abs=1e-4)


@pytest.mark.parametrize("prompt_tokens", [1, 30, 300])
def test_the_other_row_has_few_responses_and_is_no_longer_than_the_one_that_trains(prompt_tokens):
    """Where many responses share a long prompt, each with its own prompt would be several times as
    long.
    """
    responses = [[[3] * length for length in (5, 1, 9, 2)] for _ in range(4)]
    rollouts = groups_of_ids([[4] * prompt_tokens for _ in responses], responses)
    (row,) = pack(*token_ids(rollouts), Packing(10_000))
    chosen = first_responses(rollouts, row)
    every = [response.ids for p in row.groups for response in rollouts[p].responses]
    assert [group.responses[0].ids for group in chosen] == every[: len(chosen)]
    lengths = [prompt_tokens + len(ids) for ids in every]
    assert sum(lengths[: len(chosen)]) <= row.tokens
    assert len(chosen) == NOISE_RESPONSES or sum(lengths[: len(chosen) + 1]) > row.tokens


def test_the_gap_is_the_root_mean_square_of_the_responses_differences(tiny_model, tokenizer):
    policy = load_policy(tiny_model)
    sampler = EngineSampler(policy, tokenizer, max_response_tokens=9, batch_size=4)
    rollouts = sampler(tokenized(tokenizer, ["a", "a longer prompt", "bb", "c"]), 2, 0)
    microbatches = []
    for (row,) in (
        pack(*token_ids(rollouts[n : n + 2]), Packing(1000), groups=range(n, n + 2)) for n in (0, 2)
    ):
        with torch.no_grad():
            old = labeled_logprobs(policy, row)
        microbatches.append(Microbatch(row, torch.zeros(2, 2), old, old))

    def gaps(groups):
        return logprob_metrics(groups, microbatches[::-1], None)

    assert gaps(rollouts)["sampler_gap"] < 1e-4
    # One response of eight is off by 0.5 and another by 1.
    for (p, k), off in {(1, 0): 0.5, (3, 1): -1.0}.items():
        response = rollouts[p].responses[k]
        rollouts[p].responses[k] = response._replace(logprobs=[*response.logprobs, off])
    assert gaps(rollouts)["sampler_gap"] == pytest.approx(((0.25 + 1.0) / 8) ** 0.5, abs=1e-4)
    assert gaps(rollouts)["sampler_kl"] == pytest.approx((0.5 - 1.0) / 8, abs=1e-4)
    rollouts[2].responses[1] = rollouts[2].responses[1]._replace(logprobs=None)
    assert gaps(rollouts) == {}


def test_a_loss_without_a_gradient_is_refused():
    """With the zeros that would be its gradient a run would train nothing, in silence."""
    model = torch.nn.Linear(2, 1)
    optimizer = SimpleNamespace(accelerator=Accelerator(cpu=True), model=model, loss_scale=None)
    passes = Passes([(torch.ones(2), True)], 1.0)
    add_gradients(optimizer, passes, lambda model, row, divisor: (model(row).sum() / divisor, {}))
    with pytest.raises(UserError, match="the objective's loss has no gradient: it is detached"):
        add_gradients(
            optimizer, passes, lambda model, row, divisor: (model(row).sum().detach() / divisor, {})
        )
