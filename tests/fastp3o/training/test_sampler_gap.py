import pytest
import torch
from accelerate import Accelerator

from fastp3o.models.loading import load_policy
from fastp3o.models.packed_model import labelled_logprobs
from fastp3o.objectives.base import Microbatch
from fastp3o.packing.pack import Packing
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o.rollouts.groups import Group
from fastp3o.training.logprob_gaps import logprob_metrics
from fastp3o.training.microbatches import pack_minibatches
from fastp3o_kernels import sequence_logprobs
from tests.fastp3o.groups import tokenised


def test_the_gap_is_the_root_mean_square_of_the_responses_differences(tiny_model, tokenizer):
    policy = load_policy(tiny_model)
    prompts = ["a", "a longer prompt", "bb", "c"]
    sampler = EngineSampler(policy, tokenizer, max_response_tokens=9, batch_size=4)
    rollouts = sampler(tokenised(tokenizer, prompts), 2, 0)
    microbatches = []
    for row in (row for rows in pack_minibatches(Accelerator(cpu=True), rollouts, 2, Packing(30)) for row in rows):
        with torch.no_grad():
            old = labelled_logprobs(policy, row)
        sums = sequence_logprobs(old, row.cu_seqlens).view(-1, 2)
        microbatches.append(Microbatch(row, torch.zeros(len(sums), 2), old, old, sums, sums))
    assert len(microbatches) > 2

    def gaps(groups):
        return logprob_metrics(policy, groups, [microbatches[:1], microbatches[1:]], old_are_policys=True)

    assert gaps(rollouts)["sampler_gap"] < 1e-4
    # One response of eight is off by 0.5 and another by 1.
    off = {(1, 0): 0.5, (3, 1): -1.0}
    moved = [
        Group(prompt, [r._replace(logprobs=[*r.logprobs, off.get((p, k), 0.0)]) for k, r in enumerate(responses)])
        for p, (prompt, responses) in enumerate(rollouts)
    ]
    assert gaps(moved)["sampler_gap"] == pytest.approx(((0.25 + 1.0) / 8) ** 0.5, abs=1e-4)
    assert gaps(moved)["sampler_kl"] == pytest.approx((0.5 - 1.0) / 8, abs=1e-4)
    moved[2].responses[1] = moved[2].responses[1]._replace(logprobs=None)
    assert gaps(moved).keys() == {"ratio/noise"}
