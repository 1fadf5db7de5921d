from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastp3o.rewards.config import PenaltyConfig
from fastp3o.rewards.reward import penalties, repeated_share
from fastp3o.rollouts.groups import Group, Prompt, Response
from fastp3o_kernels.losses import overlong_penalty


def one_group(*responses: list[int]) -> list[Group]:
    return [Group(Prompt("", [1]), [Response(ids, "", ids[-1] == 0) for ids in responses])]


RESPONSES = one_group([5, 0], [5, 6, 5, 6, 5, 6], [7, 7, 7, 0], [1, 2, 3, 4, 5, 6, 7, 8])


def test_each_penalty_by_hand():
    config = PenaltyConfig(
        missing_eos_penalty=2.0,
        length_penalty=0.5,
        length_penalty_after=3,
        ngram_penalty=10.0,
        ngram_length=2,
        overlong_margin=4,
    )
    found = {name: values.tolist() for name, values in penalties(RESPONSES, config, longest=8).items()}
    assert found == {
        "penalty/missing_eos": [[0, 2, 0, 2]],
        "penalty/length": [[0, 1.5, 0.5, 2.5]],
        # 5 6, 6 5, 5 6, 6 5, 5 6: two of five are different; 7 7, 7 7, 7 0: two of three
        "penalty/ngram": [[0, pytest.approx(6), pytest.approx(10 / 3), 0]],
        "penalty/overlong": [[0, 0.5, 0, 1]],
    }


def test_penalties_that_are_off_are_not_told():
    assert penalties(RESPONSES, PenaltyConfig(), longest=8) == {}
    assert list(penalties(RESPONSES, PenaltyConfig(length_penalty=1.0), longest=8)) == ["penalty/length"]


def test_overlong_shaping_is_that_of_the_losses():
    lengths = torch.tensor([[2, 6, 4, 8]])
    shaped = penalties(RESPONSES, PenaltyConfig(overlong_margin=7), longest=8)["penalty/overlong"]
    assert torch.equal(shaped, -overlong_penalty(lengths, longest=8, margin=7))


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4))
def test_the_share_of_repeated_ngrams(ids, n):
    seen, repeated, total = set(), 0, 0
    for start in range(len(ids) - n + 1):
        ngram = tuple(ids[start : start + n])
        repeated += ngram in seen
        total += 1
        seen.add(ngram)
    assert repeated_share(ids, n) == pytest.approx(repeated / total if total else 0)


@dataclass(frozen=True, kw_only=True)
class Longest8(PenaltyConfig):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_penalties(8)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"missing_eos_penalty": -1.0}, "--missing_eos_penalty must be 0 or more"),
        ({"length_penalty": -1.0}, "--length_penalty must be 0 or more"),
        ({"length_penalty_after": 3}, "--length_penalty_after does nothing without --length_penalty"),
        ({"length_penalty": 1.0, "length_penalty_after": 8}, r"--length_penalty_after must be below .* \(8\), got 8"),
        ({"ngram_penalty": 1.0, "ngram_length": 0}, "--ngram_length must be at least 1"),
        ({"ngram_length": 4}, "--ngram_length does nothing without --ngram_penalty"),
        ({"overlong_margin": 9}, r"--overlong_margin must be at most --max_response_tokens \(8\), got 9"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Longest8(**settings)
