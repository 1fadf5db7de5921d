"""The record of what a user can name is the tree's, and shows in a diff what a change adds to it."""

import difflib
import warnings

import pytest

from tests.surface import (
    RECORD,
    concepts,
    configurations,
    depth,
    modules_with_whole_configurations,
    table,
    tables,
    tokens_of_code,
)


def test_a_change_of_what_a_user_can_name_is_in_the_record():
    """Each option, name, command and objective is one more thing to know. Tokens of code only warn."""
    recorded, now = RECORD.read_text(encoding="utf-8"), tables()
    diff = "\n".join(
        difflib.unified_diff(
            recorded.splitlines(), now.splitlines(), "recorded", "now", "", "", 0, ""
        )
    )
    remedy = f"If that is meant: python -m tests.surface --write\n{diff}"
    if recorded != now:
        warnings.warn(f"tests/{RECORD.name} is of an earlier tree. {remedy}", stacklevel=1)
    assert table("what a user can name", concepts()) in recorded, remedy


@pytest.mark.parametrize(
    "config", dict.fromkeys(configurations()), ids=lambda config: config.__name__
)
def test_a_configuration_is_made_of_parts_side_by_side(config):
    """Parts stand beside each other; what has the options of another and a few more is a preset of
    it, or a part.
    """
    assert depth(config) <= 6


def test_few_modules_take_a_whole_configuration():
    """The others take the parts or the values that they read."""
    modules = modules_with_whole_configurations()
    assert len(modules) <= 11, sorted(map(str, modules))


PLAIN = "def f(a, b=1):\n    return [a + b]\n"  # def f ( a , b = 1 ) : return [ a + b ]


@pytest.mark.parametrize(
    ("source", "tokens"),
    [
        (PLAIN, 16),
        ("# why\n" + PLAIN + "\n\n# more\n", 16),
        (PLAIN.replace(":\n", ':\n    """What it does.\n\n    More.\n    """\n', 1), 16),
        ('"""A file."""\n\n' + PLAIN, 16),
        ('x = option(0.0, "Help, "\n    "in two parts.", above=0)\n', 11),
        ('x = required("Help.")\n', 5),
        ('parser.add_argument("--name", help=f"Help of {1 + 2}.")\n', 9),
        ('x = f"{a + b} and {c}", "é" + "d"\n', 7),
    ],
)
def test_tokens_of_code_are_neither_words_nor_layout(source, tokens):
    assert tokens_of_code(source) == tokens
