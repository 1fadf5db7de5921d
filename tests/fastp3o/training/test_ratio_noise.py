import pytest
import torch
from torch import nn

from fastp3o.models.packed_model import PackedModel, labelled_logprobs
from fastp3o.objectives.base import Microbatch
from fastp3o.packing.pack import Packing, pack
from fastp3o.rollouts.groups import Group
from fastp3o.training import logprob_gaps
from fastp3o.training.logprob_gaps import TOLERATED, noise_warning, ratio_noise
from fastp3o_kernels import sequence_logprobs
from tests.fastp3o.groups import groups_of_ids
from tests.fastp3o.models.model_families import FOURS, PAIRS, random_model


def rollouts_and_microbatch(model: PackedModel, groups, shift: float = 0.0) -> tuple[list[Group], Microbatch]:
    """A row that holds all groups but the first, with log-probs of the policy, each sequence's moved by `shift`."""
    chosen = range(1, len(groups.prompts))
    responses = [groups.responses[p] for p in chosen]
    (row,) = pack([groups.prompts[p] for p in chosen], responses, Packing(1000), groups=chosen)
    with torch.no_grad():
        logprobs = labelled_logprobs(model, row)
    sums = sequence_logprobs(logprobs, row.cu_seqlens).view(len(chosen), -1) + shift
    return groups_of_ids(groups.prompts, groups.responses), Microbatch(row, sums, logprobs, logprobs, sums, sums)


@pytest.mark.parametrize("groups", [PAIRS, FOURS], ids=["pairs", "fours"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_in_fp32_both_ways_agree(family, groups):
    model = PackedModel(random_model(family))
    assert ratio_noise(model, *rollouts_and_microbatch(model, groups)) < 1e-4


def test_a_difference_of_all_responses_is_measured_in_nats():
    model = PackedModel(random_model("llama"))
    noise = ratio_noise(model, *rollouts_and_microbatch(model, FOURS, shift=0.5))
    torch.testing.assert_close(noise, torch.tensor(0.5), atol=1e-4, rtol=0.0)


def test_the_other_row_is_no_longer_than_the_one_that_trains(monkeypatch):
    """Where many responses share a long prompt, each with its own prompt would be several times as long."""
    model = PackedModel(random_model("llama"))
    rollouts, microbatch = rollouts_and_microbatch(model, FOURS)
    lengths = []

    def measured(policy, row):
        lengths.append(row.tokens)
        return labelled_logprobs(policy, row)

    monkeypatch.setattr(logprob_gaps, "labelled_logprobs", measured)
    assert ratio_noise(model, rollouts, microbatch) < 1e-4
    own = [rollouts[p] for p in microbatch.row.groups]
    alone = [len(group.prompt.ids) + len(response.ids) for group in own for response in group.responses]
    (length,) = lengths
    assert length <= microbatch.row.tokens < sum(alone)
    assert length in [sum(alone[:count]) for count in range(1, len(alone))]


def test_half_precision_is_louder():
    model = PackedModel(random_model("llama"))
    quiet = ratio_noise(model, *rollouts_and_microbatch(model, FOURS))
    model = nn.Module.bfloat16(model)
    assert ratio_noise(model, *rollouts_and_microbatch(model, FOURS)) > 100 * quiet


@pytest.mark.parametrize(
    ("precision", "advice"),
    [("fp32", "has the least"), ("fp16", "Use --precision fp32,"), ("bf16", "Use --precision fp16 or fp32,")],
)
def test_the_warning_says_how_much_and_what_helps(precision, advice):
    warning = noise_warning(0.123, 0.2, precision)
    assert "0.123" in warning
    assert f"{TOLERATED:.0%}" in warning
    assert advice in warning
