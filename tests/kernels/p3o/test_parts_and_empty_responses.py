"""Batches in parts, responses that take part in no pair, and batches without any pair."""

import pytest
import torch

from fastp3o_kernels import P3OSettings, linear_p3o_loss, logits_p3o_loss, p3o_loss, token_p3o_loss
from tests.kernels.problems import DEVICE, random_hidden_states, random_pairs

V, D = 30, 8
LENGTHS = [3, 4, 0, 2, 1, 5, 6, 2, 4, 1]
IMPLEMENTATIONS = ["eager", None, "triton"]
LEVELS = ["responses", "tokens", "logits", "logits, its own", "hidden", "hidden, its own"]


class Batch:
    """Responses with all that losses of any level take. Old log-probs are given, or the policy's own."""

    def __init__(self, level, lengths, clipping="joint", K=2, masked=False):
        N, self.lengths, self.K, self.level = sum(lengths), lengths, K, level
        self.states = random_hidden_states(N, V, D, DEVICE, bias=True)
        self.pairs = random_pairs(lengths, V, DEVICE, K=K, logits=self.states.logits(), masked=masked)
        if level == "responses":  # of one token each
            self.lengths = [1] * len(lengths)
        self.settings = P3OSettings(clipping=clipping)
        self.own = level.endswith("its own")
        self.divisor = N if clipping == "token" else len(lengths) // K

    def leaves(self):
        """The policy's inputs, those of tokens first."""
        if self.level.startswith("hidden"):
            states = self.states.leaves()
            return states.hidden, states.weight, states.bias
        if self.level.startswith("logits"):
            return (self.states.logits().detach().requires_grad_(),)
        logprobs = self.pairs.old_token_logprobs if self.level == "tokens" else self.pairs.ref_logprobs.flatten()
        return ((logprobs.nan_to_num() + 0.1).requires_grad_(),)

    def loss(self, leaves, prompts=slice(None), impl=None, **given):
        pairs, K = self.pairs, self.K
        prompts = slice(*prompts.indices(len(self.lengths) // K))
        bounds = [0, *torch.tensor(self.lengths).cumsum(0).tolist()][K * prompts.start : K * prompts.stop + 1]
        tokens, cu_seqlens = slice(bounds[0], bounds[-1]), [bound - bounds[0] for bound in bounds]
        known = [tensor[prompts] for tensor in (pairs.old_logprobs, pairs.ref_logprobs, pairs.rewards)]
        if self.own:
            known[0] = None
        if pairs.valid_responses is not None:
            given = {"valid_responses": pairs.valid_responses[prompts]} | given
        given |= {"impl": impl}
        own, *others = leaves
        if self.level == "responses":
            return p3o_loss(own[tokens].view(-1, K), *known, self.settings, **given)
        if self.settings.clipping == "token" and not self.own:
            given["old_token_logprobs"] = pairs.old_token_logprobs[tokens]
        if self.level == "tokens":
            return token_p3o_loss(own[tokens], cu_seqlens, *known, self.settings, **given)
        rest = pairs.labels[tokens], cu_seqlens, *known, self.settings
        if self.level.startswith("logits"):
            return logits_p3o_loss(own[tokens], *rest, **given)
        head = type(self.states)(own, *others).head
        return linear_p3o_loss(own[tokens], head, *rest, memory_budget=20_000, **given)


def gradients(loss, leaves):
    return torch.autograd.grad(loss, leaves)


def clipping_levels(clipping):
    return [level for level in LEVELS if not (clipping == "token" and level == "responses")]


EACH = [(clipping, level) for clipping in ("separate", "token") for level in clipping_levels(clipping)]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("clipping", "level"), EACH)
def test_parts_of_a_batch_add_up_to_it(clipping, level, impl):
    """One prompt, then three, then none: as with accumulation, or processes that share prompts unevenly."""
    batch = Batch(level, LENGTHS[:8], clipping)
    leaves = batch.leaves()
    whole, metrics, counts = batch.loss(leaves, impl=impl)
    divisors = (batch.divisor, float(batch.divisor), torch.tensor(batch.divisor))
    slices = (slice(0, 1), slice(1, 4), slice(4, 4))
    outputs = [batch.loss(leaves, part, impl, divisor=divisor) for part, divisor in zip(slices, divisors, strict=True)]
    parts = [output.loss for output in outputs]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-6)
    for got, expected in zip(gradients(sum(parts), leaves), gradients(whole, leaves), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    assert metrics.keys() - counts.keys() == {"ratio_max"}
    for name, count in counts.items():
        assert sum(output.counts[name] for output in outputs) == count
        total = sum(output.metrics[name] * output.counts[name] for output in outputs)
        torch.testing.assert_close(total / count, metrics[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("level", ["tokens", "hidden"])
def test_a_divisor_on_the_device_takes_in_the_loss_scale(level, impl):
    batch = Batch(level, LENGTHS[:8])
    leaves = batch.leaves()
    plain = batch.loss(leaves, impl=impl).loss
    scaled = batch.loss(leaves, impl=impl, divisor=torch.tensor(batch.divisor / 1024, device=DEVICE)).loss
    assert scaled == 1024 * plain
    for got, expected in zip(gradients(scaled, leaves), gradients(plain, leaves), strict=True):
        torch.testing.assert_close(got, 1024 * expected)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("clipping", "level"), EACH)
def test_a_prompt_without_a_pair_is_left_out(clipping, level, impl):
    """Its tokens count as tokens, and it as a prompt; nothing is asked of it."""
    batch = Batch(level, LENGTHS[4:8], clipping)
    leaves = batch.leaves()
    alone = batch.loss(leaves, slice(1, 2), impl, divisor=batch.divisor)
    batch.pairs.valid_responses = torch.tensor([[True, False], [True, True]], device=DEVICE)
    batch.pairs.old_logprobs[0], batch.pairs.rewards[0] = float("nan"), float("nan")
    both = batch.loss(leaves, impl=impl)
    torch.testing.assert_close(both.loss, alone.loss, rtol=1e-5, atol=1e-6)
    for got, expected in zip(gradients(both.loss, leaves), gradients(alone.loss, leaves), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    for name, value in alone.metrics.items():
        torch.testing.assert_close(both.metrics[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("clipping", "level"), [pair for pair in EACH if pair[1] != "responses"])
def test_an_empty_response_is_one_that_is_not_valid(clipping, level, impl):
    """Empty responses stand at every place, of three to a prompt; the last prompt keeps no pair."""
    K, lengths = 3, [0, 3, 2, 4, 0, 1, 2, 3, 0, 0, 0, 2, 0]
    lengths = lengths[:12]
    batch = Batch(level, lengths, clipping, K=K)
    leaves = batch.leaves()
    empty = batch.loss(leaves, impl=impl)
    full = Batch(level, [max(length, 1) for length in lengths], clipping, K=K)
    kept = torch.tensor(lengths, device=DEVICE).view(-1, K) > 0
    full.pairs.valid_responses = kept
    has_source = torch.cat([torch.full((max(n, 1),), n > 0) for n in lengths])
    for name in ("old_logprobs", "ref_logprobs", "rewards"):
        getattr(full.pairs, name)[kept] = getattr(batch.pairs, name)[kept]
    full.pairs.labels[has_source] = batch.pairs.labels
    full.pairs.old_token_logprobs[has_source] = batch.pairs.old_token_logprobs
    full_leaves = full.leaves()
    with torch.no_grad():
        full_leaves[0][has_source] = leaves[0]
        for target, source in zip(full_leaves[1:], leaves[1:], strict=True):
            target.copy_(source)
    output = full.loss(full_leaves, impl=impl, divisor=batch.divisor)
    torch.testing.assert_close(output.loss, empty.loss, rtol=1e-5, atol=1e-6)
    (got, *others), (expected, *expected_others) = gradients(output.loss, full_leaves), gradients(empty.loss, leaves)
    torch.testing.assert_close(got[has_source], expected, rtol=1e-4, atol=1e-6)
    assert not got[~has_source].any()
    torch.testing.assert_close(others, expected_others, rtol=1e-4, atol=1e-6)
    for name, value in empty.metrics.items():
        torch.testing.assert_close(output.metrics[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("clipping", "level"), EACH)
@pytest.mark.parametrize("lengths", [[], [0, 0], [0, 3, 2, 0]])
def test_nothing_to_learn_from_still_reaches_every_parameter(clipping, level, impl, lengths):
    batch = Batch(level, lengths, clipping)
    if level == "responses":
        batch.pairs.valid_responses = torch.zeros(len(lengths) // 2, 2, dtype=torch.bool, device=DEVICE)
    leaves = batch.leaves()
    loss, metrics, counts = batch.loss(leaves, impl=impl)
    assert loss == 0
    assert all(value == 0 for value in (*metrics.values(), *counts.values()))
    for gradient, leaf in zip(gradients(loss, leaves), leaves, strict=True):
        assert gradient.shape == leaf.shape
        assert not gradient.any()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"divisor": 0}, "divisor must be above 0, got 0"),
        ({"divisor": torch.tensor(-1)}, "divisor must be above 0, got -1"),
        ({"divisor": torch.ones(2)}, r"divisor must have shape \[\] \(one number\), got \[2\]"),
        ({"valid_responses": torch.ones(4, dtype=torch.bool)}, r"valid_responses must have shape \[2, 2\]"),
        ({"valid_responses": torch.ones(2, 2)}, "valid_responses must be bool, got torch.float32: call .bool()"),
    ],
)
@pytest.mark.parametrize("level", ["responses", "tokens", "logits", "hidden"])
def test_what_is_wrong_is_named(level, given, message):
    batch = Batch(level, [3, 4, 1, 2])
    with pytest.raises(ValueError, match=message):
        batch.loss(batch.leaves(), **given)


def test_nan_is_refused_where_it_counts(monkeypatch):
    monkeypatch.setenv("FASTP3O_DEBUG", "1")  # without it nobody looks at values on a GPU
    batch = Batch("hidden", [3, 4, 1, 2])
    batch.pairs.rewards[1, 0] = float("nan")
    with pytest.raises(ValueError, match=r"rewards\[1, 0\] is NaN"):
        batch.loss(batch.leaves())
