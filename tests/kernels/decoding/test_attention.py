"""Both implementations of decode attention."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastp3o_kernels.decoding import LayerCache, Slots
from tests.kernels.decoding.steps import oracle, random_step
from tests.kernels.problems import DEVICE


def error(step, result, expected) -> float:
    return (result.double() - expected)[step.busy].abs().max().item() if step.busy.any() else 0.0


@settings(max_examples=60, deadline=None)
@given(
    P=st.integers(1, 5),
    K=st.integers(1, 8),
    idle=st.integers(0, 3),
    Hkv=st.integers(1, 3),
    G=st.integers(1, 7),
    Lp=st.integers(0, 40),
    Lr=st.integers(1, 12),
    window=st.sampled_from([None, None, 1, 5, 30, 100]),
    softcap=st.sampled_from([None, 1.5]),
    left_out=st.integers(0, 4),
    seed=st.integers(0, 10**6),
)
def test_pytorch_is_one_softmax_per_token(P, K, idle, Hkv, G, Lp, Lr, window, softcap, left_out, seed):
    shape = {"P": P, "K": K, "idle": idle, "Hkv": Hkv, "G": G, "Lp": Lp, "Lr": Lr, "left_out": left_out}
    step = random_step(**shape, seed=seed, window=window, softcap=softcap, dtype=torch.float64)
    if len(step.query):
        expected = oracle(step)
        assert error(step, step.run("eager"), expected) < 1e-9
        assert error(step, step.to(torch.float32).run("eager"), expected) < 1e-4


def test_only_the_new_keys_and_values_are_stored(impl):
    step = random_step(P=4, K=3, D=16, device=DEVICE)
    before = LayerCache(*(tensor.clone() for tensor in vars(step.cache).values()))
    step.run(impl)
    busy = step.busy.nonzero().flatten()
    at = step.slots.steps[busy]
    for name, new in (("own_keys", step.key), ("own_values", step.value)):
        old, now = getattr(before, name), getattr(step.cache, name)
        assert torch.equal(now[busy, :, at], new[busy])
        now[busy, :, at] = old[busy, :, at]
        assert torch.equal(now[busy], old[busy])
    assert torch.equal(step.cache.prompt_keys, before.prompt_keys)


def test_bounds_of_the_host_change_nothing():
    step = random_step(P=6, K=2, left_out=0, idle=2, Lp=30, Lr=20)
    # Slots work only on prompts 2 to 4.
    response = step.slots.response
    outside = (step.slots.prompt < 2) | (step.slots.prompt > 4)
    step.slots = replace(step.slots, response=torch.where(outside, 12, response), masks={})
    expected = step.to(torch.float32).run("eager")
    longest = int(step.slots.cached_lengths[2:5].max())
    most = int(step.slots.steps.max()) + 1
    step.slots = replace(step.slots, prompts=range(2, 5), longest_prompt=longest, longest_response=most, masks={})
    torch.testing.assert_close(step.run("eager")[step.busy], expected[step.busy])


def test_several_steps_are_attention_over_a_growing_cache():
    """Each step reads the keys and values that earlier steps stored."""
    step = random_step(P=2, K=2, idle=0, left_out=0, Lr=4, dtype=torch.float64)
    for t in range(4):
        step.slots = Slots(step.slots.response, step.slots.cached_lengths, torch.full((4,), t), 2)
        step.query, step.key, step.value = (torch.randn_like(x) for x in (step.query, step.key, step.value))
        expected = oracle(step)
        assert error(step, step.run("eager"), expected) < 1e-12


def test_members_are_listed_at_the_last_of_them():
    slots = Slots(torch.tensor([4, 6, 1, 5, 0, 6]), torch.tensor([3, 3, 3, 0]), torch.zeros(6, dtype=torch.long), 2)
    assert slots.prompt.tolist() == [2, 3, 0, 2, 0, 3]
    assert slots.prompt_lengths.tolist() == [3, 0, 3, 3, 3, 0]
    none = [-1, -1]
    busy = [0, 2, 3, 4]
    assert slots.members[busy].tolist() == [none, none, [0, 3], [4, 2]]
    assert slots.members.dtype == torch.int32


def test_all_slots_idle(impl):
    step = random_step(P=2, K=2, left_out=4, idle=3, device=DEVICE)
    assert step.run(impl).isfinite().all()


def test_on_the_meta_device():
    step = random_step(device="meta", window=3)
    assert step.run("eager").shape == step.query.shape
