"""Selection by rewards, against the formulas written a second time, and by a judge's verdicts."""

from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastp3o.data.layouts import find_layout
from fastp3o.generate.config import SelectionConfig
from fastp3o.generate.samples import Samples
from fastp3o.generate.selection import (
    Candidates,
    accepted,
    judged_records,
    kept_records,
    pairs_apart,
    pairs_at_random,
    plain_text,
)
from fastp3o.rewards.verdicts import Verdict

prompt_rewards = st.lists(st.floats(-4, 4, width=32), max_size=7)


def samples(rewards: list[float], texts: list[str] | None = None, **changes) -> Samples:
    texts = [f" text {i}" for i in range(len(rewards))] if texts is None else texts
    columns = {
        "lengths": [3] * len(texts),
        "finished": [True] * len(texts),
        "read_back": [True] * len(texts),
    }
    columns |= {"responses": texts, "rewards": rewards, "template_fields": {}}
    return Samples(**({"number": 0, "prompt": "Say:"} | columns | changes))


@given(prompt_rewards, st.floats(0.1, 3), st.floats(0.51, 0.99))
def test_pairs_apart_are_those_of_rs_dpo(rewards, tau, eta):
    """The threshold has a sigmoid, as in its algorithm 1."""
    expected = [
        (w, other)
        for w in range(len(rewards))
        for other in range(len(rewards))
        if w != other and 1 / (1 + exp(-(rewards[w] - rewards[other]) / tau)) > eta
    ]
    gap = tau * log(eta / (1 - eta))
    if all(abs(abs(a - b) - gap) > 1e-6 for a in rewards for b in rewards):
        assert pairs_apart(rewards, gap) == expected


@given(
    st.lists(st.tuples(st.sampled_from("abcde"), st.floats(-4, 4, width=32)), max_size=8),
    st.floats(0.1, 10),
    st.integers(1, 8),
    st.integers(0, 99),
)
def test_rejection_sampling_is_that_of_rso(candidates, beta, count, seed):
    """Algorithm 1 of arXiv 2309.06657, on a dictionary of the candidates."""
    texts, rewards = [text for text, _ in candidates], [reward for _, reward in candidates]
    chosen = accepted(Candidates(texts, rewards), beta, count, np.random.default_rng(seed))
    first, random, expected = dict(reversed(candidates)), np.random.default_rng(seed), []
    left = {text: first[text] for text in texts}
    while left and len(expected) < count:
        highest = max(left.values())
        for text, reward in list(left.items()):
            if len(expected) < count and random.random() < np.exp((reward - highest) / beta):
                expected.append(text)
                left.pop(text)
    assert [texts[i] for i in chosen] == expected
    assert len(chosen) == min(count, len(set(texts)))


@given(
    st.permutations(range(6)),
    st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=6, max_size=6),
    st.integers(0, 9),
)
def test_random_pairs_are_disjoint_and_the_higher_reward_is_better(order, rewards, seed):
    chosen = order[:5]
    pairs = pairs_at_random(chosen, rewards, np.random.default_rng(seed))
    members = [i for pair in pairs for i in pair]
    assert len(set(members)) == len(members)
    assert set(members) <= set(chosen)
    assert all(rewards[better] > rewards[worse] for better, worse in pairs)
    assert len(pairs_at_random(chosen, list(range(6)), np.random.default_rng(seed))) == 2


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"keep": "all"}, [(" a", 1.0), (" b", 3.0), (" c", 2.0), (" e", 3.0)]),
        ({"keep": "best"}, [(" b", 3.0)]),
        ({"keep": "rest", "threshold": 2.0}, [(" b", 3.0), (" e", 3.0)]),
        (
            {"keep": "rejection_sampling", "beta": 1e-3, "accept": 3},
            [(" b", 3.0), (" e", 3.0), (" c", 2.0)],
        ),
        ({"keep": "rso", "beta": 1e-3, "accept": 4}, [(" b", " c", 1.0), (" e", " a", 2.0)]),
        ({"keep": "rs_dpo", "min_gap": 1.0}, [(" b", " a", 2.0), (" e", " a", 2.0)]),
    ],
)
def test_records_are_of_the_layouts_that_training_reads(settings, expected):
    for prompt in ("Say:", [{"role": "user", "content": "Say:"}]):
        # Without text, and without an end: neither is kept. Of the two highest the first one is the
        # best.
        one = samples(
            [1.0, 3.0, 2.0, 9.0, 9.0, 3.0], [" a", " b", " c", "\n", " d", " e"], prompt=prompt
        )
        one.finished[4] = False
        got = kept_records(one, SelectionConfig(**settings), seed=0)
        for record in got:
            assert record.pop("prompt") == prompt
            layout = find_layout({"prompt": prompt, **record}, 2 if "chosen" in record else 1)
            texts = [part.value for part in layout.responses({"prompt": prompt, **record})]
            if prompt != "Say:":
                texts = [message["content"] for (message,) in texts]
            record["texts"] = texts
        assert [
            (*record["texts"], record.get("reward", record.get("margin"))) for record in got
        ] == expected


def test_random_choices_depend_on_seed_and_prompt_alone_and_equal_texts_are_no_choice():
    config = SelectionConfig(keep="rejection_sampling", beta=5.0, accept=3)
    one, other = (
        samples([0.1 * i for i in range(8)]),
        samples([0.1 * i for i in range(8)], number=1),
    )
    assert kept_records(one, config, seed=0) == kept_records(one, config, seed=0)
    assert kept_records(one, config, seed=0) != kept_records(one, config, seed=1)
    assert kept_records(one, config, seed=0) != kept_records(other, config, seed=0)
    assert (
        kept_records(
            samples([1.0, 2.0, 3.0], [" a", " a", "a\n"]), SelectionConfig(keep="rs_dpo"), seed=0
        )
        == []
    )


def test_each_response_is_in_one_pair_and_the_better_one_is_chosen():
    asked = []

    def judge(prompts, firsts, seconds):
        asked.extend(zip(prompts, firsts, seconds, strict=True))
        order = [Verdict.FIRST, Verdict.SECOND, Verdict.TIE, Verdict.NONE]
        return [order[number % 4] for number in range(len(prompts))]

    given = [samples([], list("abcd"), number=number, prompt=f"p{number}") for number in range(4)]
    given.append(samples([], ["x", " x "], number=4, prompt="same"))
    given.append(samples([], ["x", "y", ""], number=5, prompt="cut", finished=[True, False, True]))
    judged = judged_records(given, judge, unfinished=False, seed=1)
    assert len(asked) == 8  # two pairs of four responses, and none of "same" and "cut"
    for number in range(4):
        assert sorted(
            text for prompt, *texts in asked if prompt == f"p{number}" for text in texts
        ) == list("abcd")
    assert (judged.ties, judged.unanswered) == (2, 2)
    (_, first, second), (_, third, fourth) = asked[:2]
    assert judged.records[0] == [
        {"prompt": "p0", "chosen": first, "rejected": second},
        {"prompt": "p0", "chosen": fourth, "rejected": third},
    ]
    assert sum(map(len, judged.records.values())) == 4
    assert judged_records(given, judge, unfinished=False, seed=1) == judged
    before = len(asked)
    judged_records(given, judge, unfinished=True, seed=1)
    assert {text for _, *texts in asked[before + 8 :] for text in texts} == {"x", "y"}
    # A judge reads messages as text.
    system, user = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say tree:"},
    )
    assert plain_text("Say tree:") == plain_text([user]) == "Say tree:"
    assert plain_text([system, user]) == "system: Be brief.\n\nuser: Say tree:"
