"""Decode attention against fp64: Triton's error is bounded by that of the PyTorch path in the same
dtype.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastp3o_kernels.decoding import LayerCache, Slots, decode_attention
from fastp3o_kernels.decoding.attention_kernel import CHUNK
from fastp3o_kernels.operation import INTERPRET
from tests.kernels.decoding.steps import oracle, random_step
from tests.kernels.interpreted import counted_launches, counted_traffic
from tests.kernels.problems import DEVICE, EXAMPLES


def error(step, result, expected) -> float:
    return (result.double() - expected)[step.busy].abs().max().item() if step.busy.any() else 0.0


def check(step) -> None:
    """PyTorch's error is of rounding, and Triton's bounded by it."""
    expected = oracle(step)
    dtype = step.query.dtype
    assert error(step, step.to(torch.float64).run("eager"), expected) < 1e-9
    eager, triton = step.to(dtype).run("eager"), step.to(dtype).run("triton")
    assert triton.dtype == dtype
    assert (triton[~step.busy] == 0).all()
    assert eager.isfinite().all()
    # A few roundings at the size of the values; the interpreter cuts off where hardware rounds to
    # 16 bits.
    floor = 4 * torch.finfo(torch.float32).eps + (2 * torch.finfo(dtype).eps if INTERPRET else 0.0)
    assert (
        error(step, triton, expected)
        <= 2 * error(step, eager, expected) + floor * expected.abs().max().item()
    )


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    P=st.integers(1, 4),
    K=st.integers(1, 8),
    idle=st.integers(0, 2),
    Hkv=st.integers(1, 3),
    G=st.integers(1, 7),
    D=st.sampled_from([16, 20, 32]),
    Lp=st.sampled_from([0, 1, 5, 30, 64, 65, CHUNK, 2 * CHUNK + 20]),
    Lr=st.sampled_from([1, 2, 20, CHUNK + 1]),
    window=st.sampled_from([None, None, 1, 5, 70, CHUNK, 3 * CHUNK]),
    softcap=st.sampled_from([None, None, 1.5]),
    left_out=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 10**6),
)
def test_random_steps(P, K, idle, Hkv, G, D, Lp, Lr, window, softcap, left_out, dtype, seed):
    shape = {
        "P": P,
        "K": K,
        "idle": idle,
        "Hkv": Hkv,
        "G": G,
        "D": D,
        "Lp": Lp,
        "Lr": Lr,
        "left_out": left_out,
    }
    assume(left_out < P * K or idle)
    step = random_step(**shape, seed=seed, window=window, softcap=softcap, dtype=dtype)
    check(step)
    if not step.busy.any():
        return
    # The new keys are there at the next step.
    step, lengths = step.to(torch.float64), step.slots.cached_lengths
    step.run("eager")
    steps = (step.slots.steps + 1).clamp(max=Lr - 1).where(step.busy, 0)
    step.slots = Slots(step.slots.response, lengths, steps, K)
    step.query = torch.randn_like(step.query)
    expected = oracle(step)
    assert error(step, step.run("eager"), expected) < 1e-9


@pytest.mark.parametrize(
    "shape",
    [
        *({"G": 4, "Hkv": 1, "D": D, "Lp": 70} for D in (64, 80, 96, 256)),
        # More queries than a tile holds: one response's heads take more than one, too.
        *(
            {"P": 1, "K": 3, "G": 71, "Lr": 3, "window": 7, "dtype": dtype}
            for dtype in (torch.float32, torch.float16)
        ),
        # Around blocks and chunks.
        *(
            {"P": 1, "left_out": 0, "Lp": Lp, "Lr": Lr}
            for Lp, Lr in ((0, 1), (63, 64), (CHUNK + 1, CHUNK + 2))
        ),
        # More chunks than merge_kernel reads at once.
        {"P": 1, "K": 1, "idle": 0, "left_out": 0, "Hkv": 1, "Lp": 12 * CHUNK + 3},
    ],
    ids=str,
)
def test_sizes_around_heads_tiles_blocks_and_chunks(shape):
    check(random_step(**shape))


def test_maxima_far_apart():
    step = random_step(P=1, K=2, idle=0, left_out=0, Lp=3 * CHUNK, Lr=CHUNK + 40)
    for keys in (step.key, step.cache.prompt_keys, step.cache.own_keys):
        keys *= 60
    step.cache.prompt_keys[:, :, CHUNK : 2 * CHUNK] *= 30
    check(step)
    step.cache.own_keys[:, :, -3:] *= 1000
    check(step)


def test_nothing_unwritten_is_read():
    """Cache memory that was never written, and what other slots left in buffers, may be NaN."""
    step = random_step(P=3, K=2, idle=2, Lp=30, Lr=20)
    expected = step.to(torch.float32).run("triton")
    for tensor in vars(step.cache).values():
        tensor[tensor == 1e4] = float("nan")
    assert torch.equal(step.run("triton"), expected)


def test_layouts():
    step = random_step()
    expected = step.to(torch.float32).run("triton")
    apart = (lambda x: torch.stack([x, x], 3)[..., 0], lambda x: torch.stack([x, x], 2)[:, :, 0])
    for view in (torch.Tensor.contiguous, *apart):
        views = {name: view(getattr(step, name)) for name in ("query", "key", "value")}
        assert torch.equal(replace(step, **views).to(torch.float32).run("triton"), expected)
    step.cache.own_keys = step.cache.own_keys.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        step.run("triton")


@pytest.mark.parametrize("window", [None, 40])
def test_a_result_does_not_depend_on_its_neighbours(impl, window):
    """It depends neither on their queries, steps or prompts, nor on whether a sibling is still
    decoding.
    """

    def random(seed):
        sizes = {"P": 3, "K": 3, "idle": 1, "left_out": 0, "Hkv": 1, "Lp": 300, "Lr": 280}
        return random_step(**sizes, window=window, seed=seed)

    step = random(0)
    mine = int((step.slots.response == 7).nonzero())
    expected = step.to(torch.float32).run(impl)[mine]
    for seed in range(1, 3):
        other, slots = random(seed), step.slots
        gone = (
            torch.rand(len(slots.response), generator=torch.Generator().manual_seed(seed)) < 0.4
        ).to(DEVICE)
        response, steps = (
            torch.where(gone, 9, slots.response),
            torch.where(gone, 0, other.slots.steps),
        )
        response[mine], steps[mine] = slots.response[mine], slots.steps[mine]
        lengths = other.slots.cached_lengths
        lengths[2] = slots.cached_lengths[2]
        for name, tensor in vars(other.cache).items():
            kept = 2 if name.startswith("prompt") else mine
            tensor[kept] = getattr(step.cache, name)[kept]
        for name in ("query", "key", "value"):
            getattr(other, name)[mine] = getattr(step, name)[mine]
        other.slots = Slots(response, lengths, steps, 3)
        assert torch.equal(other.run(impl)[mine], expected)


def test_offsets_beyond_2_to_the_31():
    """The last prompt lies beyond. Untouched memory is not taken. Slots' offsets are computed in
    the same way.
    """
    D, Lp = 16, 256
    P = 2**31 // (D * Lp) + 1
    keys = torch.empty(P, 1, Lp, D, dtype=torch.float16, device=DEVICE)
    keys[-1] = torch.randn(Lp, D)
    lengths = torch.zeros(P + 1, dtype=torch.long, device=DEVICE)
    lengths[P - 1] = Lp
    own = torch.zeros(1, 1, 4, D, dtype=torch.float16, device=DEVICE)
    query = torch.randn(1, 1, D, device=DEVICE).half()
    zero = torch.zeros(1, dtype=torch.long, device=DEVICE)

    def run(keys, P, lengths, impl):
        slots = Slots(torch.full_like(zero, P - 1), lengths, zero, 1)
        cache = LayerCache(keys, keys, own.clone(), own.clone())
        return decode_attention(query, query, query, cache, slots, scale=0.25, impl=impl)

    expected = run(keys[-1:].clone(), 1, lengths[-2:], "eager")
    torch.testing.assert_close(run(keys, P, lengths, "triton"), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.skipif(not INTERPRET, reason="counted in the interpreter")
def test_a_prompts_keys_are_read_once_for_all_responses(monkeypatch):
    sizes = {"P": 3, "K": 4, "D": 64, "left_out": 0, "Lp": 2 * CHUNK + 50, "Lr": 40}
    step = random_step(**sizes, dtype=torch.float16)
    with counted_traffic(monkeypatch) as traffic, counted_launches(monkeypatch) as launches:
        step.run("triton")
    assert launches == {"partial_attention_kernel": 1, "merge_kernel": 1}
    token = 2 * 64 * 2  # bytes of the heads' keys
    prompts, own = (
        step.slots.cached_lengths.sum() * token,
        step.slots.steps[step.busy].sum() * token,
    )
    found = {"loaded": [], "stored": []}
    for kind, tensor in product(found, vars(step.cache).values()):
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        accesses = [part for part in traffic.addresses[kind] if part.size]
        found[kind].append(
            sum(int(size[(begin <= at) & (at < end)].sum()) for at, size in accesses)
        )
    loaded, stored = found.values()
    assert loaded == [prompts, prompts, own, own]
    assert stored == [0, 0, *[step.busy.sum() * token] * 2]
    # The rest: queries, new keys, the chunks' results, lengths.
    assert traffic.loaded < 1.2 * sum(loaded)
