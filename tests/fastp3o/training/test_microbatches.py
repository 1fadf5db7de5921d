from functools import partial
from itertools import chain

import pytest
import torch
from accelerate import Accelerator

from fastp3o.models.packed_model import PackedModel, labelled_logprobs
from fastp3o.models.reference import SecondModel
from fastp3o.objectives.p3o import P3OConfig
from fastp3o.packing.pack import Packing
from fastp3o.rollouts.groups import Group
from fastp3o.training.microbatches import equal_passes, make_microbatches, pack_minibatches, policy_logprobs
from tests.fastp3o.groups import groups_of_ids
from tests.fastp3o.models.model_families import logprobs_alone, random_model

P, K = 6, 3


@pytest.fixture
def rollouts() -> list[Group]:
    generator = torch.Generator().manual_seed(0)

    def ids() -> list[int]:
        return torch.randint(3, 48, (int(torch.randint(1, 9, (), generator=generator)),), generator=generator).tolist()

    response_ids = [[ids() for _ in range(K)] for _ in range(P)]
    return groups_of_ids([ids() for _ in range(P)], response_ids)


@pytest.mark.parametrize("packing", [Packing(1000), Packing(30), Packing(30, share_prompts=False)])
def test_every_prompt_is_in_one_minibatch_and_minibatches_are_of_equal_counts(rollouts, packing):
    minibatches = pack_minibatches(Accelerator(cpu=True), rollouts, 3, packing)
    groups = [[group for row in rows for group in row.groups] for rows in minibatches]
    assert list(map(len, groups)) == [2, 2, 2]
    assert sorted(chain.from_iterable(groups)) == list(range(P))
    for rows in minibatches:
        for row in rows:
            expected = [token for p in row.groups for response in rollouts[p].responses for token in response.ids]
            assert row.labels.tolist() == expected


@pytest.mark.parametrize("objective", ["joint", "token"])
def test_microbatches_hold_what_belongs_to_their_groups(rollouts, objective):
    accelerator = Accelerator(cpu=True)
    policy, reference = (PackedModel(random_model(family)) for family in ("llama", "gpt2"))
    rewards = torch.arange(P * K).view(P, K).float()
    minibatches = make_microbatches(
        accelerator,
        partial(policy_logprobs, policy),
        SecondModel(reference, accelerator.device, offload=False),
        pack_minibatches(accelerator, rollouts, 2, Packing(30)),
        rewards,
        None,
    )
    p3o = P3OConfig(model="m", output_dir="o", prompts="p", reward="r", clipping=objective).build()
    passes = equal_passes(accelerator, minibatches, None, p3o)
    for minibatch, (rows, divisor) in zip(minibatches, passes, strict=True):
        assert rows == [(microbatch, True) for microbatch in minibatch]
        tokens = sum(len(microbatch.row.labels) for microbatch in minibatch)
        assert divisor == (tokens if objective == "token" else P // 2)
        for microbatch in minibatch:
            row, groups = microbatch.row, list(microbatch.row.groups)
            assert torch.equal(microbatch.rewards, rewards[groups])
            # Bit for bit what training computes before its first step.
            assert torch.equal(microbatch.old_token_logprobs, labelled_logprobs(policy, row).detach())
            assert not microbatch.old_logprobs.requires_grad
    for model, name in ((policy, "old_logprobs"), (reference, "ref_logprobs")):
        with torch.no_grad(), model.with_own_attention() as alone:
            for microbatch in (microbatch for minibatch in minibatches for microbatch in minibatch):
                for sums, p in zip(getattr(microbatch, name), microbatch.row.groups, strict=True):
                    prompt, responses = rollouts[p]
                    expected = [logprobs_alone(alone, prompt.ids, response.ids).sum() for response in responses]
                    expected = torch.stack(expected)
                    torch.testing.assert_close(sums, expected, atol=1e-4, rtol=1e-5)
