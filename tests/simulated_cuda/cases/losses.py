"""Fused losses on the pretended device: the host waits nowhere in them, and a chunk takes few
launches.
"""

from itertools import accumulate

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import interpreter, jit

import fastp3o_kernels as kernels
from fastp3o_kernels import losses
from tests.kernels.problems import budget_for
from tests.simulated_cuda.host import recorded

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The last group is larger than the buffer for logits; one response is empty.
LENGTHS = [3, 4, 2, 0, 5, 1, 9, 14]
N, P, V, D = sum(LENGTHS), len(LENGTHS) // 2, 48, 16
OFFSETS = [0, *accumulate(LENGTHS)]
BUDGET = budget_for(10, V)
DEVICE = torch.device("cuda")


def randn(*shape, dtype=torch.float32, gradient=False):
    return torch.randn(*shape, dtype=dtype, device=DEVICE).requires_grad_(gradient)


def labels(tokens=N):
    return torch.randint(V, (tokens,), device=DEVICE)


def head_of(dtype, **options):
    return kernels.Head(
        randn(V, D, dtype=dtype, gradient=True),
        bias=randn(V, dtype=dtype, gradient=True),
        **options,
    )


OBJECTIVES = {
    "grpo": lambda g: (
        losses.ppo_clip(
            g.token_logprobs, g["old"], g.per_token(losses.group_advantages(g["rewards"]))
        )
        + losses.k3(g.token_logprobs, g["old"])
    ).sum(),
    "dpo": lambda g: losses.dpo(g.logprobs, g["ref"]).sum(),
    "orpo": lambda g: losses.orpo(g.means(g.token_logprobs) - 1).sum(),
    "entropy": lambda g: (g.logprobs.sum() - 0.1 * g.entropy.sum(), {"entropy": g.entropy.sum()}),
    "reinforce": lambda g: -(g["rewards"] * g.logprobs).sum(),
    "nothing to learn": lambda g: (0.0 * g.logprobs).sum(),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("impl", [None, "eager"])
def test_an_objective_waits_for_nothing(name, impl):
    hidden, head = randn(N, D, dtype=torch.float16, gradient=True), head_of(torch.float16)
    options = {
        "response_tensors": {"ref": randn(P, 2), "rewards": randn(P, 2)},
        "token_tensors": {"old": randn(N)},
    }
    options |= {"divisor": torch.tensor(3.0), "memory_budget": BUDGET, "responses_per_group": 2}
    options |= {"outputs": ("entropy",) if name == "entropy" else (), "impl": impl}
    with recorded() as record:
        kernels.linear_loss(
            hidden, head, labels(), OFFSETS, OBJECTIVES[name], **options
        ).loss.backward()
    assert record.waits == [], record.table()
    assert all(leaf.grad is not None for leaf in (hidden, head.weight, head.bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("clipping", "own"), [("joint", False), ("separate", True), ("none", False), ("token", False)]
)
@pytest.mark.parametrize("impl", [None, "eager"])
def test_p3o_and_log_probs_wait_for_nothing_at_every_level(dtype, clipping, own, impl):
    settings = kernels.P3OSettings(clipping=clipping)
    hidden, head, tokens = (
        randn(N, D, dtype=dtype, gradient=True),
        head_of(dtype, softcap=5.0),
        labels(),
    )
    logits = randn(N, V, dtype=dtype, gradient=True)
    old, ref, rewards = (randn(P, 2) for _ in range(3))
    given = OFFSETS, None if own else old, ref, rewards, settings
    options = {
        "valid_responses": rewards > -1,
        "sampler_logprobs": None if own else randn(P, 2),
        "impl": impl,
    }
    options |= {
        "divisor": torch.tensor(3.0),
        "old_token_logprobs": randn(N) if clipping == "token" else None,
    }
    with recorded() as record:
        kernels.linear_p3o_loss(
            hidden, head, tokens, *given, **options, memory_budget=BUDGET
        ).loss.backward()
        kernels.logits_p3o_loss(logits, tokens, *given, **options).loss.backward()
        kernels.token_p3o_loss(randn(N, gradient=True), *given, **options).loss.backward()
        if clipping != "token":
            del options["old_token_logprobs"]
            kernels.p3o_loss(randn(P, 2, gradient=True), *given[1:], **options).loss.backward()
        wanted = {"outputs": ("entropy", "mean_logit", "is_top"), "impl": impl}
        found = kernels.linear_logprobs(
            hidden, head, tokens, cu_seqlens=OFFSETS, memory_budget=BUDGET, **wanted
        )
        (
            kernels.sequence_logprobs(found.logprobs, OFFSETS, impl=impl).sum()
            + found.entropy.sum()
        ).backward()
        found = kernels.token_logprobs(logits, tokens, **wanted)
        (found.logprobs.sum() + found.entropy.sum()).backward()
    assert record.waits == [], record.table()


def test_a_device_that_is_not_the_current_one():
    def elsewhere(*shape):
        return torch.randn(*shape, device="cuda:1").requires_grad_()

    hidden, weight, tokens = elsewhere(N, D), elsewhere(V, D), labels().to("cuda:1")
    known = [elsewhere(P, 2).detach() for _ in range(3)]
    with recorded() as record:
        kernels.linear_p3o_loss(
            hidden, weight, tokens, OFFSETS, *known, memory_budget=BUDGET
        ).loss.backward()
        kernels.linear_loss(
            hidden, weight, tokens, OFFSETS, lambda groups: groups.logprobs.sum()
        ).loss.backward()
        found = kernels.linear_logprobs(
            hidden, weight, tokens, cu_seqlens=OFFSETS, outputs=("entropy",)
        )
        (kernels.sequence_logprobs(found.logprobs, OFFSETS).sum() + found.entropy.sum()).backward()
        kernels.token_logprobs(elsewhere(N, V), tokens).sum().backward()
    assert record.devices.keys() == {"cuda:1"}
    assert torch.cuda.current_device() == 0


# Launches of a chunk of one pair, beside the products of a filling.
MOST_LAUNCHES = {torch.float32: 7, torch.bfloat16: 7, torch.float16: 9}


@pytest.mark.parametrize("dtype", DTYPES)
def test_launches_of_a_chunk(dtype):
    def launches(pairs):
        tokens = 8 * pairs
        hidden, weight = (
            randn(tokens, D, dtype=dtype, gradient=True),
            randn(V, D, dtype=dtype, gradient=True),
        )
        known = list(range(0, tokens + 1, 4)), randn(pairs, 2), randn(pairs, 2), randn(pairs, 2)
        labeled = labels(tokens)
        budget = V * (4 * 8 + dtype.itemsize * tokens)  # logits of one pair, gradients of all
        with recorded() as record:
            kernels.linear_p3o_loss(hidden, weight, labeled, *known, memory_budget=budget)
        return record.launches

    few, many = launches(4), launches(6)
    assert many["triton exponentials_kernel"] - few["triton exponentials_kernel"] == 2
    assert (many.total() - few.total()) / 2 <= MOST_LAUNCHES[dtype], many - few


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_launches_of_ragged_updates_have_few_variants(dtype, monkeypatch):
    """Slices begin at any address and have any length: neither may ask for another variant of a
    kernel.
    """
    backend, variants, run = (
        make_backend(GPUTarget("cuda", 90, 32)),
        set(),
        interpreter.InterpretedFunction.run,
    )

    def noted_run(kernel, *args, **kwargs):
        compiled = jit.JITFunction(kernel.fn, **kernel.kwargs)
        bind = jit.create_function_from_signature(compiled.signature, compiled.params, backend)
        variants.add(f"{kernel.__name__} {bind(*args, **kwargs)[1]}")
        return run(kernel, *args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", noted_run)
    weight, budget = (
        randn(V + 1, D, dtype=dtype, gradient=True),
        {"memory_budget": budget_for(5, V + 1)},
    )
    torch.manual_seed(0)
    for update in range(20):
        offsets = [0, *torch.randint(4, (2 + 2 * (update % 3),)).cumsum(0).tolist()]
        batch = randn(offsets[-1], D, dtype=dtype, gradient=True), weight, labels(offsets[-1])
        logprobs = torch.cat(
            [randn(update % 4), kernels.linear_logprobs(*batch, **budget).detach()]
        )[update % 4 :]
        old = kernels.sequence_logprobs(logprobs, offsets).view(-1, 2)
        kernels.linear_p3o_loss(
            *batch, offsets, old, old + 1, torch.randn_like(old), **budget
        ).loss.backward()
    assert len(variants) <= 8, "\n".join(sorted(variants))
