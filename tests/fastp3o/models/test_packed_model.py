from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.peak_memory import PeakMemory
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from tests.fastp3o.models import model_families as families
from tests.fastp3o.on_meta import META, on_meta_alone


@pytest.mark.parametrize(
    ("groups", "lora"),
    [(families.PAIRS, False), (families.FOURS, False), (families.PAIRS, True)],
    ids=["pairs", "fours", "LoRA"],
)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_packed_row_equals_one_sequence_at_a_time(family, groups, lora):
    """Prompts are shared or not, and activations are kept or computed again; with LoRA over a
    frozen base.
    """
    model = families.adapted(family) if lora else PackedModel(families.random_model(family))
    with model.with_own_attention() as inner:
        expected = families.alone(inner, groups)
    assert all((".lora_" in name) == lora for name in expected.gradients)
    for share_prompts in (True, False):
        families.assert_equal(
            families.packed(model, groups, expected, share_prompts=share_prompts), expected
        )
    model.recompute_activations()
    calls = []
    inside = model.layers()[0].modules()
    product = next(
        module for module in inside if getattr(module, "weight", torch.empty(0)).dim() == 2
    )
    product.register_forward_hook(lambda *_: calls.append(product))
    families.assert_equal(families.packed(model.train(), groups, expected), expected)
    # One pass is of log-probabilities; the loss has two, since its backward pass comes upon the
    # layer again.
    assert len(calls) == 3


@torch.no_grad()
def sequence_logprobs(model, groups, share_prompts) -> dict[int, list[float]]:
    row = groups.row(share_prompts=share_prompts)
    parts = labeled_logprobs(model, row).split(row.labeled_lengths)
    return {s: part.tolist() for s, part in zip(groups.order(row), parts, strict=True)}


ids = st.lists(st.integers(3, families.VOCABULARY - 1), min_size=1, max_size=9)


@pytest.fixture(scope="module")
def some_models():
    return [families.random_model(family) for family in ("mistral", "gemma2", "gpt2")]


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(ids, st.lists(ids, min_size=1, max_size=4)), min_size=1, max_size=3),
    st.booleans(),
)
def test_random_groups_equal_one_sequence_at_a_time(some_models, groups, share_prompts):
    groups = families.Groups(
        [prompt for prompt, _ in groups], [responses for _, responses in groups]
    )
    for model in some_models:
        got = sequence_logprobs(PackedModel(model), groups, share_prompts)
        model.set_attn_implementation("eager")
        for s, (prompt, response) in enumerate(groups.sequences):
            with torch.no_grad():
                expected = families.logprobs_alone(model, prompt, response)
            torch.testing.assert_close(torch.tensor(got[s]), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("share_prompts", [True, False], ids=["shared", "plain"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_group_in_parts_is_the_whole_one(family, share_prompts):
    """Log-probs and gradients in fp64, but for norms in fp32; of activations the parts' hidden
    states alone stay.
    """
    exact = family in ("gpt2", "gpt_neox", "opt")
    model, found = PackedModel(families.random_model(family)).double(), []
    for tokens_per_row, parts in ((1000, 0), (14 if share_prompts else 20, 2), (1, 4)):
        row = families.FOURS.first_row(tokens_per_row, share_prompts=share_prompts)
        assert len(row.parts) == parts
        model.zero_grad()
        with PeakMemory() as memory:
            logprobs = labeled_logprobs(model, row)
        kept = sum(size for storage, size in memory.alive.values() if not storage.expired())
        (logprobs * torch.linspace(-1, 2, len(logprobs))).sum().backward()
        gradients = [
            parameter.grad for parameter in model.parameters() if parameter.grad is not None
        ]
        found.append((kept, [logprobs.detach(), *gradients]))
    for kept, values in found[1:]:
        assert kept < found[0][0] / 2
        for value, expected in zip(values, found[0][1], strict=True):
            assert (value - expected).abs().max() <= (1e-13 if exact else 1e-6) * found[0][1][
                1
            ].abs().max()


@pytest.mark.parametrize("share_prompts", [True, False], ids=["shared", "plain"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_response_sees_its_prompt_and_no_other_response(family, share_prompts):
    model = PackedModel(families.random_model(family))
    before = sequence_logprobs(model, families.FOURS, share_prompts)
    after = sequence_logprobs(
        model, replace(families.FOURS, prompts=[families.FOURS.prompts[0], [44]]), share_prompts
    )
    assert [after[s] for s in range(4)] == [before[s] for s in range(4)]
    assert all(after[s] != before[s] for s in range(4, 8))

    changed = families.FOURS.replaced(group=0, response=0, ids=[41, 42, 43])
    after = sequence_logprobs(model, changed, share_prompts)
    assert after.pop(0) != before.pop(0)
    assert after == before  # bit for bit


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("family", "changes", "end"),
    [
        ("gpt2", {}, 64),
        ("llama", {}, 64),
        ("llama", {"rope_parameters": YARN}, 256),
        (
            "llama",
            {"rope_parameters": YARN | {"rope_type": "linear"}, "max_position_embeddings": 256},
            256,
        ),
        # These depend on the longest sequence of a row, and end at their original length.
        ("llama", {"rope_parameters": YARN | {"rope_type": "dynamic"}}, 64),
        ("llama", {"rope_parameters": YARN | {"rope_type": "longrope"} | LONGROPE}, 16),
    ],
)
def test_positions_end_where_the_configuration_says_or_what_its_scaling_makes_of_it(
    family, changes, end
):
    model = PackedModel(families.random_model(family, **changes))
    model.check_reach(end)
    with pytest.raises(
        ValueError, match=f"up to {end + 1} tokens together, and the positions of .* end at {end}"
    ):
        model.check_reach(end + 1)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_nothing_in_a_forward_pass_waits_for_the_device(family, monkeypatch):
    model, row = PackedModel(families.random_model(family)).to(META), families.PAIRS.row().to(META)
    with on_meta_alone(monkeypatch):
        hidden = model(row, row.labeled_at, lambda hidden, head: hidden)
    assert hidden.shape == (len(row.labels), 32)
