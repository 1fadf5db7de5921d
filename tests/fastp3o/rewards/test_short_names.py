import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastp3o.rewards.config import short_names


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["/tmp/x/rm/model"], ["model"]),
        (["rewards:vowels", "runs/rm/model/", "owner/name"], ["vowels", "model", "name"]),
        (["runs/a/model", "runs/b/model", "math:correct"], ["runs/a/model", "runs/b/model", "correct"]),
        (["one.two:f", "three:f"], ["one.two:f", "three:f"]),
        (["http://host:8000/score", "http://host:8001/score"], ["http://host:8000/score", "http://host:8001/score"]),
        (["model", "a/model", "b/a/model"], ["model", "a/model", "b/a/model"]),
        (["/model", "model"], ["/model", "model"]),
        (["model", "model/"], ["model", "model/"]),
        (["/", "."], ["/", "."]),
        ([], []),
    ],
)
def test_the_last_part_that_tells_a_name_from_the_others(names: list[str], expected: list[str]):
    assert short_names(names) == expected


@given(st.lists(st.text("ab/:", min_size=1, max_size=8), unique=True, max_size=5))
def test_different_names_stay_different_ends(names: list[str]):
    shortened = short_names(names)
    assert len(set(shortened)) == len(names)
    assert all(short in name for short, name in zip(shortened, names, strict=True))
