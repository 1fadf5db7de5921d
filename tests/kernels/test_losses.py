"""Each objective against its paper's formula, one pair, response or token at a time, in fp64."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import exp, log

from fastp3o_kernels import losses


def sigmoid(x):
    return 1 / (1 + exp(-x))


def randn(*shape, seed=0, scale=1.0):
    return scale * torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def odds(x):
    return exp(x) / (1 - exp(x))


def test_ratios_to_the_sampler_end_at_their_cap_and_are_constants():
    log_ratios = torch.tensor([-1e38, -100.0, -0.5, 0.0, 0.5, 2.0, 100.0, 1e38], requires_grad=True)
    ratios = losses.truncated_ratios(log_ratios, 2.0)
    torch.testing.assert_close(
        ratios, torch.tensor([0.0, 0.0, math.exp(-0.5), 1, math.exp(0.5), 2, 2, 2])
    )
    assert not ratios.requires_grad


# Losses of a pair. Each entry is our loss of log-probs x and what is known of them, [P, 2] each,
# and the formula of the log-probs a, b of the chosen and the rejected response (or of responses 1
# and 2), and their log-ratios s, t.
PAIRS = {
    "rebel": (
        lambda x, known: losses.rebel(x, known, 2 * known, eta=0.7),
        lambda a, b, s, t: ((s - t) / 0.7 - 2 * ((a - s) - (b - t)).detach()) ** 2,
    ),
    "copg": (
        lambda x, known: losses.copg(x, known, 2 * known, beta=0.3),
        lambda a, b, s, t: (0.3 / 2 * (s - t) - 2 * ((a - s) - (b - t)).detach()) * (s - t),
    ),
    "dpo": (
        lambda x, known: losses.dpo(x, known, beta=0.3),
        lambda a, b, s, t: -log(sigmoid(0.3 * (s - t))),
    ),
    "smoothed dpo": (
        lambda x, known: losses.dpo(x, known, beta=0.3, label_smoothing=0.2),
        lambda a, b, s, t: -0.8 * log(sigmoid(0.3 * (s - t))) - 0.2 * log(sigmoid(-0.3 * (s - t))),
    ),
    "ipo": (
        lambda x, known: losses.ipo(x, known, tau=0.2),
        lambda a, b, s, t: (s - t - 1 / 0.4) ** 2,
    ),
    "simpo": (
        lambda x, known: losses.simpo(x, beta=2.5, gamma=0.4),
        lambda a, b, s, t: -log(sigmoid(2.5 * a - 2.5 * b - 0.4)),
    ),
    "smoothed simpo": (
        lambda x, known: losses.simpo(x, beta=2.5, gamma=0.4, label_smoothing=0.2),
        lambda a, b, s, t: (
            -0.8 * log(sigmoid(2.5 * a - 2.5 * b - 0.4))
            - 0.2 * log(sigmoid(2.5 * b - 2.5 * a + 0.4))
        ),
    ),
    "orpo": (
        lambda x, known: losses.orpo(x, weight=0.3),
        lambda a, b, s, t: -a - 0.3 * log(sigmoid(log(odds(a) / odds(b)))),
    ),
    "cpo": (
        lambda x, known: losses.cpo(x, beta=0.3, weight=0.5),
        lambda a, b, s, t: -log(sigmoid(0.3 * (a - b))) - 0.5 * a,
    ),
    "smoothed cpo": (
        lambda x, known: losses.cpo(x, beta=0.3, weight=0.5, label_smoothing=0.2),
        lambda a, b, s, t: (
            -0.8 * log(sigmoid(0.3 * (a - b))) - 0.2 * log(sigmoid(0.3 * (b - a))) - 0.5 * a
        ),
    ),
    "slic": (
        lambda x, known: losses.slic(x, delta=0.8, weight=0.1),
        lambda a, b, s, t: torch.clamp(0.8 - a + b, min=0) - 0.1 * a,
    ),
    "apo_zero": (
        lambda x, known: losses.apo_zero(x, known, beta=0.3),
        lambda a, b, s, t: (1 - sigmoid(0.3 * s)) + sigmoid(0.3 * t),
    ),
    "apo_down": (
        lambda x, known: losses.apo_down(x, known, beta=0.3),
        lambda a, b, s, t: sigmoid(0.3 * s) + (1 - sigmoid(0.3 * (s - t))),
    ),
    "discopop": (
        lambda x, known: losses.discopop(x, known, beta=0.3, tau=0.4),
        lambda a, b, s, t: (
            (1 - sigmoid(0.75 * (s - t))) * -log(sigmoid(0.3 * (s - t)))
            + sigmoid(0.75 * (s - t)) * exp(-0.3 * (s - t))
        ),
    ),
}


def clipped(x, old, A, low, high):
    ratio = exp(x - old)
    return max(-A * ratio, -A * torch.clamp(ratio, 1 - low, 1 + high))


def vespo(x, o, A):
    ratio, k, decay = exp(x - o).detach(), *((1.5, 0.7) if A >= 0 else (2.5, 1.2))
    return -A * ratio**k * exp(decay * (1 - ratio)) * x


def sapo(x, o, A):
    tau = 0.7 if A > 0 else 1.3
    return -A * sigmoid(tau * (exp(x - o) - 1)) * 4 / tau


def kto(x, o, A):
    return (
        1.1 * (1 - sigmoid(0.3 * (x - o - 0.2)))
        if A > 0
        else 0.9 * (1 - sigmoid(0.3 * (0.2 - (x - o))))
    )


# Losses of one response or token: x its log-prob, o and A what is known of it.
SINGLES = {
    "reinforce": (lambda x, o, A: losses.reinforce(x, A), lambda x, o, A: -A * x),
    "ppo": (
        lambda x, o, A: losses.ppo_clip(x, o, A, clip_low=0.1, clip_high=0.3),
        lambda x, o, A: clipped(x, o, A, 0.1, 0.3),
    ),
    "ppo, both sides": (
        lambda x, o, A: losses.ppo_clip(x, o, A, clip_low=0.1),
        lambda x, o, A: clipped(x, o, A, 0.1, 0.1),
    ),
    "ppo with a penalty": (
        lambda x, o, A: losses.ppo_penalty(x, o, A, coef=0.7),
        lambda x, o, A: -A * exp(x - o) + 0.7 * (exp(x - o) - 1 - (x - o)),
    ),
    "kto": (
        lambda x, o, A: losses.kto(
            x, o, A > 0, 0.2, beta=0.3, desirable_weight=1.1, undesirable_weight=0.9
        ),
        kto,
    ),
    "nash_md": (
        lambda x, o, A: losses.nash_md(x, o, A.sigmoid(), tau=0.2),
        lambda x, o, A: -(sigmoid(A) - 0.5 - 0.2 * (x.detach() - o)) * x,
    ),
    "cispo": (
        lambda x, o, A: losses.cispo(x, o, A, clip_low=0.1, clip_high=0.3),
        lambda x, o, A: -A * torch.clamp(exp(x - o).detach(), 0.9, 1.3) * x,
    ),
    "sapo": (lambda x, o, A: losses.sapo(x, o, A, tau_pos=0.7, tau_neg=1.3), sapo),
    "vespo": (
        lambda x, o, A: losses.reinforce(
            x, A * losses.vespo_weights(x - o, A, (1.5, 2.5), (0.7, 1.2))
        ),
        vespo,
    ),
    "k1": (lambda x, o, A: losses.k1(x, o), lambda x, o, A: x - o),
    "k2": (lambda x, o, A: losses.k2(x, o), lambda x, o, A: (x - o) ** 2 / 2),
    "k3": (lambda x, o, A: losses.k3(x, o), lambda x, o, A: exp(o - x) - 1 - (o - x)),
}


def compare(ours, formula, logprobs: torch.Tensor, *known: torch.Tensor) -> None:
    """Values and gradients by the log-probs, and that what is known of them gets no gradient."""
    mine, theirs = (logprobs.clone().requires_grad_() for _ in range(2))
    constants = [tensor.clone().requires_grad_() for tensor in known]
    got = ours(mine, *constants)
    rows = zip(*(tensor.unbind() for tensor in (theirs, *known)), strict=True)
    expected = torch.stack([formula(*row) for row in rows])
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    weights = randn(len(expected), seed=9)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)
    assert all(tensor.grad is None or not tensor.grad.any() for tensor in constants)


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), P=st.integers(1, 5), scale=st.sampled_from([0.1, 1.0, 3.0]))
def test_pairs(name, seed, P, scale):
    ours, formula = PAIRS[name]
    logprobs = -randn(P, 2, seed=seed, scale=scale).abs() - 0.01
    known = logprobs + randn(P, 2, seed=seed + 1)
    compare(ours, lambda pair, k: formula(*pair, *(pair - k)), logprobs, known)


@pytest.mark.parametrize("name", SINGLES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 9), scale=st.sampled_from([1e-4, 0.3, 2.0]))
def test_responses_and_tokens(name, seed, n, scale):
    ours, formula = SINGLES[name]
    logprobs = -randn(n, seed=seed, scale=2.0).abs() - 0.01
    compare(
        ours,
        formula,
        logprobs,
        logprobs + randn(n, seed=seed + 1, scale=scale),
        randn(n, seed=seed + 2),
    )


@pytest.mark.parametrize("name", sorted(PAIRS))
@pytest.mark.parametrize("worse", [0, 1])
def test_pairs_that_are_far_apart_have_a_finite_loss_and_gradient(name, worse):
    logprobs = torch.full((1, 2), -0.5)
    logprobs[0, worse] = -3000.0
    logprobs.requires_grad_()
    values = PAIRS[name][0](logprobs, torch.full((1, 2), -1.0))
    values.sum().backward()
    assert values.isfinite().all()
    assert logprobs.grad.isfinite().all()


def test_vespos_weights_end_at_0_and_oapls_value_is_between_the_mean_reward_and_the_best():
    far = torch.tensor([0.0, 3000.0, -3000.0], requires_grad=True)
    weights = losses.vespo_weights(far, far, (2, 3), (3, 2))
    assert weights.tolist() == [1, 0, 0]
    assert not weights.requires_grad
    rewards, zeros = torch.tensor([[900.0, 1000.0, 1100.0]]), torch.zeros(1, 3)
    for beta1, value in ((1e-3, 1100.0), (1e6, 1000.0)):
        loss = losses.oapl(zeros, zeros, rewards, beta1=beta1)
        torch.testing.assert_close(loss, (rewards - value).square(), rtol=0.02, atol=1)


def test_advantages_within_a_group():
    rewards = torch.tensor([[1.0, 2.0, 6.0], [3.0, 3.0, 3.0]], dtype=torch.float64)
    centred = torch.tensor([[-2.0, -1.0, 3.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(losses.rloo_advantages(rewards), 1.5 * centred)
    torch.testing.assert_close(losses.group_advantages(rewards, scale=False), centred)
    shifted = losses.group_advantages(rewards + torch.tensor([[5.0], [-7.0]]))
    torch.testing.assert_close(shifted, centred / (math.sqrt(7) + 1e-4))


def test_ktos_reference_point_is_a_constant_that_is_not_negative():
    logprobs = randn(5).requires_grad_()
    assert losses.kto_reference_point(logprobs, logprobs + 1) == 0
    point = losses.kto_reference_point(logprobs, logprobs - 2)
    assert point == 2
    assert not point.requires_grad


def test_orpos_odds_keep_their_digits_and_gradients_at_both_ends():
    for dtype in (torch.float32, torch.float64):
        mean_logprobs = torch.tensor(
            [[0.0, -1e-9], [-1e-4, -80.0], [-500.0, -0.693]], dtype=dtype, requires_grad=True
        )
        loss = losses.orpo(mean_logprobs)
        loss.sum().backward()
        assert loss.isfinite().all()
        assert mean_logprobs.grad.isfinite().all()
    # The odds of e^-1e-4 are 1e4, those of one half 1.
    loss = losses.orpo(torch.tensor([[-1e-4, -math.log(2)]]), weight=1.0).item()
    assert loss == pytest.approx(1e-4 + math.log1p(math.expm1(1e-4)), rel=1e-4)


# Log-ratios and advantages beyond what fp32 exponentiates. Eighths, so that differences of
# log-probs are exact.
EXTREME = st.sampled_from(
    [-1e4, -745.0, -100.0, -50.0, -0.125, 0.0, 0.125, 50.0, 79.0, 88.0, 100.0, 1000.0, 1e4]
) | (st.integers(-80_000, 80_000).map(lambda eighths: eighths / 8))
ADVANTAGES = st.sampled_from([0.0, 1.0, -1.0, 3.5, -1e-3, 100.0])
mp = mpmath.MPContext()
mp.prec = 100


def clipped_exactly(log_ratio, A, low, high):
    ratio = mp.exp(log_ratio)
    bounded = min(max(ratio, 1 - mp.mpf(low)), 1 + mp.mpf(high))
    return max(
        -A * ratio, -A * bounded
    ), -A * ratio if -A * ratio > -A * bounded or ratio == bounded else 0


def vespos_weight(log_ratio, A):
    k, decay = (1.5, 0.7) if A >= 0 else (2.5, 1.2)
    return mp.exp(k * log_ratio - decay * mp.expm1(log_ratio))


def sapo_exactly(log_ratio, A):
    """Loss and gradient."""
    tau, ratio = 0.7 if A > 0 else 1.3, mp.exp(log_ratio)
    gate = 1 / (1 + mp.exp(-tau * (ratio - 1)))
    return -A * gate * 4 / tau, -A * gate * (1 - gate) * 4 * ratio


# By the names of SINGLES: loss and gradient of x with the log-ratio d, x - o.
EXACT = {
    "ppo": lambda x, d, A: clipped_exactly(d, A, 0.1, 0.3),
    "ppo, both sides": lambda x, d, A: clipped_exactly(d, A, 0.1, 0.1),
    "ppo with a penalty": lambda x, d, A: (
        (0.7 - A) * mp.exp(d) - 0.7 - 0.7 * d,
        (0.7 - A) * mp.exp(d) - 0.7,
    ),
    "k3": lambda x, d, A: (mp.expm1(-d) + d, -mp.expm1(-d)),
    "step_kl": lambda x, d, A: (mp.expm1(d) - d, mp.expm1(d)),
    "cispo": lambda x, d, A: (
        -A * min(max(mp.exp(d), 0.9), 1.3) * x,
        -A * min(max(mp.exp(d), 0.9), 1.3),
    ),
    "sapo": lambda x, d, A: sapo_exactly(d, A),
    "vespo": lambda x, d, A: (-A * vespos_weight(d, A) * x, -A * vespos_weight(d, A)),
}
EXTREMES = SINGLES | {"step_kl": (lambda x, o, A: losses.step_kl(x, o), None)}
WITHOUT_ADVANTAGE = ("k3", "step_kl")  # estimators of the KL
LARGEST = mp.exp(0.9 * math.log(torch.finfo(torch.float32).max))


@pytest.mark.parametrize("name", EXTREMES)
@settings(max_examples=40, deadline=None)
@given(x=EXTREME, log_ratio=EXTREME, A=ADVANTAGES)
def test_no_log_ratio_gives_nan(name, x, log_ratio, A):
    """Also not where it overflows: there a loss is large, and its gradient has the sign of the true
    one.
    """
    ours, x = EXTREMES[name][0], -abs(x)
    logprob = torch.tensor([x], requires_grad=True)
    value = ours(logprob, torch.tensor([x - log_ratio]), torch.tensor([A]))
    (gradient,) = torch.autograd.grad(value.sum(), logprob)
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    if name in EXACT:
        scale = 1 if name in WITHOUT_ADVANTAGE else abs(A) or 1
        for got, expected in zip(
            (value.item(), gradient.item()), EXACT[name](x, log_ratio, A), strict=True
        ):
            if abs(expected) < LARGEST * scale:
                assert got == pytest.approx(float(expected), rel=1e-4, abs=1e-6), (
                    name,
                    x,
                    log_ratio,
                    A,
                )
            else:
                assert abs(got) > 1e30, (name, x, log_ratio, A)
                assert (got > 0) == (expected > 0)


@pytest.mark.parametrize("name", EXTREMES)
@settings(max_examples=20, deadline=None)
@given(
    log_ratios=st.lists(EXTREME, min_size=2, max_size=4),
    A=ADVANTAGES,
    infinite=st.sampled_from([-1, 0, 1]),
)
def test_what_is_masked_has_no_gradient_whatever_its_ratio(name, log_ratios, A, infinite):
    """An old probability of 0, or one of the policy's, is no matter either to what exponentiates
    its ratio.
    """
    ours = EXTREMES[name][0]
    if name in EXACT and infinite:
        log_ratios[0] = infinite * math.inf
    x = torch.full((len(log_ratios),), -2.0, requires_grad=True)
    old = x.detach() - torch.tensor(log_ratios)
    ours(x, old, torch.full_like(old, A)).where(
        torch.zeros_like(old, dtype=torch.bool), 0.0
    ).sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize(
    "name", sorted({*PAIRS} - {"orpo", "simpo", "smoothed simpo", "cpo", "smoothed cpo", "slic"})
)
@settings(max_examples=20, deadline=None)
@given(log_ratios=st.tuples(EXTREME, EXTREME))
def test_no_log_ratios_of_a_pair_give_nan(name, log_ratios):
    logprobs = torch.full((1, 2), -3.0, requires_grad=True)
    values = PAIRS[name][0](logprobs, logprobs.detach() - torch.tensor([log_ratios]))
    values.sum().backward()
    assert values.isfinite().all()
    assert logprobs.grad.isfinite().all()


def test_discopops_exponential_is_bounded_where_it_grows():
    logprobs = torch.tensor([[-2e4, 0.0]], requires_grad=True)
    values = losses.discopop(logprobs, torch.full((1, 2), -1.0), beta=0.1, tau=3.0)
    values.where(torch.tensor([False]), 0.0).sum().backward()
    assert values.isfinite().all()
    assert not logprobs.grad.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_ordinary_ratios_keep_every_bit(dtype):
    x = torch.linspace(-30, 9, 400, dtype=dtype).requires_grad_()
    ratios, expected = losses.bounded_exp(x), x.exp()
    assert torch.equal(ratios, expected)
    assert torch.equal(
        torch.autograd.grad(ratios.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0]
    )
    far = torch.tensor([math.inf, 3e4, -math.inf], dtype=dtype).requires_grad_()
    assert losses.bounded_exp(far).isfinite().all()
    slopes = torch.func.vmap(torch.func.grad(lambda one: losses.step_kl(one, one.detach() * 0)))(
        x.detach()
    )
    torch.testing.assert_close(slopes, torch.expm1(x.detach()), rtol=1e-2, atol=1e-2)
