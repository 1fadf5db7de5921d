import pytest
import torch

from fastp3o_kernels import P3OSettings, p3o_loss, sequence_logprobs, token_p3o_loss
from tests.kernels.problems import CLIPPINGS, DEVICE, relative_error


def four(P, scale=0.3, dtype=torch.float32):
    torch.manual_seed(P)
    sums = -20 + torch.randn(P, 2, dtype=dtype, device=DEVICE)
    moved = [sums + scale * torch.randn(P, 2, dtype=dtype, device=DEVICE) for _ in range(2)]
    return sums, *moved, torch.randn(P, 2, dtype=dtype, device=DEVICE)


def run(logprobs, *others, impl, **settings):
    logprobs = logprobs.detach().requires_grad_()
    output = p3o_loss(logprobs, *others, P3OSettings(**settings), impl=impl)
    output.loss.backward()
    return output, logprobs.grad


@pytest.mark.parametrize("clipping", ["joint", "separate", "none"])
@pytest.mark.parametrize("P", [1, 15, 16, 17, 40])
def test_triton_equals_eager(clipping, P):
    expected, expected_gradient = run(*four(P), clipping=clipping, impl="eager")
    got, gradient = run(*four(P), clipping=clipping, impl="triton")
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clipping", ["joint", "separate", "none"])
@pytest.mark.parametrize("far", [1e4, -1e4])
def test_ratios_never_overflow(clipping, far, impl):
    sums, old, ref, rewards = four(4)
    output, gradient = run(sums + far, old, ref, rewards, clipping=clipping, impl=impl)
    assert output.loss.isfinite()
    assert gradient.isfinite().all()
    assert all(value.isfinite() for value in output.metrics.values())


def test_on_policy_every_clipping_is_the_pairwise_policy_gradient(impl):
    sums, _, ref, rewards = four(5)
    gradients = [run(sums, sums, ref, rewards, clipping=c, impl=impl)[1] for c in ("joint", "separate", "none")]
    q = rewards[:, 0] - rewards[:, 1] - 0.05 * ((sums - ref)[:, 0] - (sums - ref)[:, 1])
    expected = torch.stack([-q, q], dim=1) / (2 * len(q))
    for gradient in gradients:
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_a_policy_that_went_too_far_the_right_way_has_no_gradient(impl):
    """Response 1 is better and already preferred by more than the clip range; response 2 of pair 1 likewise."""
    old = torch.full((2, 2), -10.0, device=DEVICE)
    logprobs = old + torch.tensor([[0.5, 0.0], [0.5, 0.0]], device=DEVICE)
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=DEVICE)
    output, gradient = run(logprobs, old, old, rewards, kl_coef=0.0, impl=impl)
    assert (gradient[0] == 0).all()
    assert gradient[1, 0] > 0 > gradient[1, 1]
    assert output.metrics["zero_gradient_fraction"] == 0.5
    assert output.metrics["clip_fraction"] == 1


def test_token_losses_are_refused_on_sums():
    with pytest.raises(ValueError, match="token_p3o_loss or logits_p3o_loss"):
        p3o_loss(*four(2), P3OSettings(clipping="token"))


def test_fp64_stays_fp64_in_eager_and_is_refused_by_triton():
    assert p3o_loss(*four(3, dtype=torch.float64)).loss.dtype == torch.float64
    with pytest.raises(ValueError, match="fp64"):
        p3o_loss(*four(3, dtype=torch.float64), impl="triton")


def test_token_log_probs_of_any_head_will_do(impl):
    sums, old, ref, rewards = four(2)
    tokens = sums.flatten().repeat_interleave(3) / 3
    offsets = torch.arange(0, 13, 3, dtype=torch.int32, device=DEVICE)
    from_tokens = token_p3o_loss(tokens, offsets, old, ref, rewards, impl=impl)
    torch.testing.assert_close(
        from_tokens.loss, p3o_loss(sums, old, ref, rewards, impl=impl).loss, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_very_different_lengths_and_more_pairs_than_a_tile(clipping):
    lengths = [1, 700, 3, 1] + [2, 1] * 17
    torch.manual_seed(0)
    logprobs = -torch.rand(sum(lengths), device=DEVICE)
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0, dtype=torch.int32)
    sums = sequence_logprobs(logprobs, cu_seqlens, impl="eager").view(-1, 2)
    rest = sums + 0.3 * torch.randn_like(sums), sums + torch.randn_like(sums), torch.randn_like(sums)
    old_token_logprobs = logprobs + 0.3 * torch.randn_like(logprobs) if clipping == "token" else None
    settings = P3OSettings(clipping=clipping)

    def run(impl, dtype):
        leaf = logprobs.to(dtype).requires_grad_()
        old = None if old_token_logprobs is None else old_token_logprobs.to(dtype)
        pairs = [tensor.to(dtype) for tensor in rest]
        output = token_p3o_loss(leaf, cu_seqlens, *pairs, settings, old_token_logprobs=old, impl=impl)
        output.loss.backward()
        return output.loss.detach(), leaf.grad

    expected, expected_gradient = run("eager", torch.float64)
    loss, gradient = run("triton", torch.float32)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3, abs=1e-4)
    assert relative_error(gradient, expected_gradient) < 1e-3


@pytest.mark.parametrize("length", [1, 255, 256, 257, 1000])
def test_sums_and_losses_add_in_the_same_order(length, impl):
    """So that the ratio of equal log-probs is exactly 1, however long a response is."""
    torch.manual_seed(length)
    cu_seqlens = torch.tensor([0, length, length + 3], device=DEVICE, dtype=torch.int32)
    logprobs = -torch.rand(length + 3, device=DEVICE)
    sums = sequence_logprobs(logprobs, cu_seqlens, impl=impl).view(-1, 2)
    metrics = token_p3o_loss(logprobs, cu_seqlens, sums, sums, torch.zeros_like(sums), impl=impl).metrics
    assert metrics["ratio_mean"] == metrics["ratio_max"] == 1


@pytest.mark.parametrize("clipping", ["joint", "separate", "none"])
@pytest.mark.parametrize("K", [3, 5])
def test_more_responses_are_all_their_pairs(clipping, K, impl):
    """The mean over a prompt's pairs is the loss of these pairs apart, and so are its gradients."""
    torch.manual_seed(K)
    sums, old, ref, rewards = (torch.randn(7, K, device=DEVICE) for _ in range(4))
    old, ref = sums + 0.3 * old, sums + ref
    output, gradient = run(sums, old, ref, rewards, clipping=clipping, impl=impl)
    pairs = [(i, j) for i in range(K) for j in range(i + 1, K)]
    losses, expected = [], torch.zeros_like(sums)
    for pair in map(list, pairs):
        pair_output, pair_gradient = run(*(t[:, pair] for t in (sums, old, ref, rewards)), clipping=clipping, impl=impl)
        losses.append(pair_output.loss.detach())
        expected[:, pair] += pair_gradient / len(pairs)
    torch.testing.assert_close(output.loss.detach(), torch.stack(losses).mean(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(output.metrics["ratio_max"], (sums - old).exp().max())


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_a_shift_per_prompt_changes_nothing_for_more_responses(clipping, impl):
    K, P = 4, 5
    torch.manual_seed(0)
    cu_seqlens = torch.arange(0, 2 * K * P + 1, 2, dtype=torch.int32, device=DEVICE)
    logprobs = -torch.rand(2 * K * P, device=DEVICE)
    sums = sequence_logprobs(logprobs, cu_seqlens, impl=impl).view(P, K)
    rewards = torch.randint(-8, 8, (P, K), device=DEVICE) / 8
    shift = torch.randint(-64, 64, (P, 1), device=DEVICE).float()
    old = {"old_token_logprobs": logprobs - 0.1} if clipping == "token" else {}
    plain, shifted = (
        token_p3o_loss(logprobs, cu_seqlens, sums + 0.1, sums, r, P3OSettings(clipping=clipping), impl=impl, **old).loss
        for r in (rewards, rewards + shift)
    )
    assert torch.equal(plain, shifted)


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("K", [16, 20])
def test_many_responses(clipping, K):
    torch.manual_seed(K)
    lengths = torch.randint(1, 5, (2 * K,))
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int().to(DEVICE)
    logprobs = -torch.rand(int(lengths.sum()), device=DEVICE)
    sums = sequence_logprobs(logprobs, cu_seqlens, impl="eager").view(2, K)
    rest = sums + 0.3 * torch.randn_like(sums), sums + torch.randn_like(sums), torch.randn_like(sums)
    old = {"old_token_logprobs": logprobs + 0.3 * torch.randn_like(logprobs)} if clipping == "token" else {}
    gradients = []
    for impl in ("eager", "triton"):
        leaf = logprobs.clone().requires_grad_()
        token_p3o_loss(leaf, cu_seqlens, *rest, P3OSettings(clipping=clipping), impl=impl, **old).loss.backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_one_response_is_no_pair():
    sums = torch.zeros(3, 1)
    with pytest.raises(ValueError, match="K of at least 2"):
        p3o_loss(sums, sums, sums, sums)
