"""Uses of the losses in other trainers: one test for each thing that went wrong once, or might.

Elsewhere: padded batches in the wrong order, shifted or scored at the prompt (test_response_tokens.py); heads with
adapters, DDP, FSDP2 and autocast (test_exposed_head.py); compiled models (test_compiled_models.py); no triton
(test_without_triton.py); empty batches and parts of batches (p3o/test_parts_and_empty_responses.py); other objectives
(losses/); the wheel (../test_wheel.py); the trainers themselves (../fastp3o/integrations/).
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fastp3o_kernels import (
    Groups,
    P3OSettings,
    linear_logprobs,
    linear_loss,
    linear_p3o_loss,
    logits_p3o_loss,
    sequence_logprobs,
    token_logprobs,
    token_p3o_loss,
)
from tests.kernels.problems import DEVICE, random_hidden_states, random_pairs

LENGTHS, V, D = [3, 4, 0, 2, 1, 5], 30, 8
STATES = random_hidden_states(sum(LENGTHS), V, D, DEVICE)
PAIRS = random_pairs(LENGTHS, V, DEVICE, logits=STATES.logits())
LABELS, OFFSETS = PAIRS.labels, PAIRS.cu_seqlens
KNOWN = PAIRS.old_logprobs, PAIRS.ref_logprobs, PAIRS.rewards
IMPLEMENTATIONS = [None, "triton", "eager"]


def sums_of_squares(groups: Groups) -> torch.Tensor:
    return groups.logprobs.square().sum()


# Functions of hidden states and weight to a number, by every public function that takes offsets.
LOSSES = {
    "linear_p3o_loss": lambda hidden, weight, offsets=OFFSETS, **given: (
        linear_p3o_loss(hidden, weight, LABELS, offsets, *KNOWN, **given).loss
    ),
    "linear_p3o_loss, its own": lambda hidden, weight, offsets=OFFSETS, **given: (
        linear_p3o_loss(hidden, weight, LABELS, offsets, None, *KNOWN[1:], **given).loss
    ),
    "linear_loss": lambda hidden, weight, offsets=OFFSETS, **given: (
        linear_loss(hidden, weight, LABELS, offsets, sums_of_squares, responses_per_group=2, **given).loss
    ),
    "linear_logprobs": lambda hidden, weight, offsets=OFFSETS, **given: linear_logprobs(
        hidden, weight, LABELS, cu_seqlens=offsets, **given
    ).sum(),
    "logits_p3o_loss": lambda hidden, weight, offsets=OFFSETS, **given: (
        logits_p3o_loss(hidden @ weight.T, LABELS, offsets, *KNOWN, **given).loss
    ),
    "logits_p3o_loss, its own": lambda hidden, weight, offsets=OFFSETS, **given: (
        logits_p3o_loss(hidden @ weight.T, LABELS, offsets, None, *KNOWN[1:], **given).loss
    ),
    "token_p3o_loss": lambda hidden, weight, offsets=OFFSETS, **given: (
        token_p3o_loss(token_logprobs(hidden @ weight.T, LABELS, **given), offsets, *KNOWN, **given).loss
    ),
    "sequence_logprobs": lambda hidden, weight, offsets=OFFSETS, **given: (
        sequence_logprobs(token_logprobs(hidden @ weight.T, LABELS, **given), offsets, **given).square().sum()
    ),
}
FUSED = [name for name in LOSSES if name.startswith("linear")]


def value_and_gradients(name, leaves=None, **given):
    states = STATES.leaves() if leaves is None else leaves
    loss = LOSSES[name](states.hidden, states.weight, **given)
    return loss.detach(), *torch.autograd.grad(loss, (states.hidden, states.weight))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_offsets_of_any_kind_on_any_device(name, impl):
    expected = value_and_gradients(name, impl=impl)
    for offsets in (OFFSETS.tolist(), tuple(OFFSETS.tolist()), OFFSETS.cpu().long(), OFFSETS.int().to(DEVICE)):
        assert all(map(torch.equal, value_and_gradients(name, offsets=offsets, impl=impl), expected))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0.0, 3, 7, 7, 9, 10, 15], "cu_seqlens must be int32 or int64, got torch.float32"),
        ([], r"shape \[S \+ 1\], got \[0\]"),
        ([0, 3, 7, 7, 9, 10, 14], r"cu_seqlens\[6\] = 14 must be the number of tokens, 15"),
    ],
)
def test_wrong_offsets_are_named(name, offsets, message):
    with pytest.raises(ValueError, match=message):
        value_and_gradients(name, offsets=offsets)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_what_is_known_of_responses_is_constant(impl):
    known = [tensor.clone().requires_grad_() for tensor in KNOWN]
    logprobs = token_logprobs(STATES.logits().requires_grad_(), LABELS, impl=impl)
    token_p3o_loss(logprobs, OFFSETS, *known, impl=impl).loss.backward()
    assert [tensor.grad for tensor in known] == [None] * 3


@pytest.mark.parametrize("impl", [None, "triton"])
@pytest.mark.parametrize("name", FUSED)
def test_a_gradient_of_the_gradient_is_refused(name, impl):
    """It is not zero, as if the penalty did not depend on the weights."""
    states = STATES.leaves()
    loss = LOSSES[name](states.hidden, states.weight, impl=impl)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(loss, states.hidden, create_graph=True)


@pytest.mark.parametrize("name", FUSED)
def test_forward_mode_and_transforms_are_refused(name):
    def loss(hidden):
        return LOSSES[name](hidden, STATES.weight)

    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.jvp(loss, (STATES.hidden,), (STATES.hidden,))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.vmap(loss)(STATES.hidden.expand(2, -1, -1))


@pytest.mark.parametrize("name", FUSED)
def test_a_loss_scale_is_divided_out(name):
    """Scales the loss as a GradScaler does."""
    _, *expected = value_and_gradients(name)
    states = STATES.leaves()
    (1024 * LOSSES[name](states.hidden, states.weight)).backward()
    for got, target in zip(states.gradients(), expected, strict=True):
        torch.testing.assert_close(got / 1024, target)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(name, reentrant):
    expected = value_and_gradients(name)
    states = STATES.leaves()
    loss = checkpoint(LOSSES[name], states.hidden, states.weight, use_reentrant=reentrant)
    loss.backward()
    for got, target in zip((loss.detach(), *states.gradients()), expected, strict=True):
        torch.testing.assert_close(got, target)


@pytest.mark.parametrize("name", FUSED)
def test_a_tied_weight_gets_both_gradients(name):
    weight, ids = STATES.weight.clone().requires_grad_(), LABELS.roll(1)
    gradients = []
    for head in (weight, weight.detach().clone().requires_grad_()):
        loss = LOSSES[name](torch.nn.functional.embedding(ids, weight), head)
        gradients.append(torch.autograd.grad(loss, {weight, head}))
    torch.testing.assert_close(gradients[0][0], sum(gradients[1]))


def test_two_processes_with_three_prompts_and_one_have_the_gradient_of_all():
    """Their gradients are averaged, so each divides by the number of all prompts over that of processes."""
    _, expected, expected_weight = value_and_gradients("linear_p3o_loss")
    states = STATES.leaves()
    for prompts in (slice(0, 1), slice(1, 3)):
        tokens = slice(*OFFSETS[[2 * prompts.start, 2 * prompts.stop]].tolist())
        offsets = OFFSETS[2 * prompts.start : 2 * prompts.stop + 1] - tokens.start
        known = (tensor[prompts] for tensor in KNOWN)
        given = states.hidden[tokens], states.weight, LABELS[tokens], offsets, *known
        (linear_p3o_loss(*given, divisor=torch.tensor(3 / 2)).loss / 2).backward()
    torch.testing.assert_close(states.hidden.grad, expected)
    torch.testing.assert_close(states.weight.grad, expected_weight)


def test_dpo_grpo_and_rloo_are_a_few_lines():
    """Losses on log-probs of tokens, against sums over the log-softmax of all logits."""
    states, (chosen, rejected) = STATES.to(torch.float64).leaves(), KNOWN[0].double()[:2]
    lengths = OFFSETS.diff().clamp(min=1)

    def three(tokens):
        sums = sequence_logprobs(tokens, OFFSETS)
        pairs, rewards = sums.view(-1, 2), PAIRS.rewards.double()
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
        dpo = -torch.nn.functional.logsigmoid(0.1 * (pairs[:2, 0] - chosen - (pairs[:2, 1] - rejected))).mean()
        grpo = -(advantages.repeat_interleave(OFFSETS.diff()) * (tokens - tokens.detach()).exp()).mean()
        rloo = -(2 * advantages * sums / lengths).mean()
        return torch.stack([dpo, grpo, rloo])

    got = three(linear_logprobs(states.hidden, states.weight, LABELS))
    expected = three(states.logits().log_softmax(1).gather(1, LABELS[:, None]).squeeze(1))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    for one, other in zip(got, expected, strict=True):
        leaves = states.hidden, states.weight
        torch.testing.assert_close(
            torch.autograd.grad(one, leaves, retain_graph=True), torch.autograd.grad(other, leaves, retain_graph=True)
        )


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_one_prompt_and_no_token_are_batches_too(impl):
    tokens = slice(0, 7)
    given = STATES.hidden[tokens], STATES.weight, LABELS[tokens], [0, 3, 7], *(tensor[:1] for tensor in KNOWN)
    assert linear_p3o_loss(*given, P3OSettings(), impl=impl).loss.isfinite()
    assert linear_logprobs(STATES.hidden[:0], STATES.weight, LABELS[:0], cu_seqlens=[0], impl=impl).shape == (0,)
    assert token_logprobs(STATES.logits()[:0], LABELS[:0], impl=impl).shape == (0,)
    assert sequence_logprobs(torch.zeros(0, device=DEVICE), [0, 0, 0], impl=impl).tolist() == [0.0, 0.0]
    assert sequence_logprobs(torch.zeros(0, device=DEVICE), [0], impl=impl).shape == (0,)
