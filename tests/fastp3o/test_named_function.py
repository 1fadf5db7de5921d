"""A user's function by name: from an installed module or the current directory, or an error that names it."""

import sys
from pathlib import Path

import pytest

from fastp3o.named_function import import_function


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the current directory."""
    (tmp_path / "judges_for_tests.py").write_text("def longer(a, b):\n    return max(a, b, key=len)\n\nconstant = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "judges_for_tests", raising=False)


def test_a_function_of_the_current_directory_or_of_an_installed_package():
    before = list(sys.path)
    assert import_function("judges_for_tests:longer", "judge")("a", "bb") == "bb"
    assert import_function("os.path:basename", "judge")("a/b") == "b"
    assert sys.path == before


def test_a_function_that_is_not_there_is_named():
    before = list(sys.path)
    for names, message in {
        ("no_such_module:f", "judges_for_tests:f"): "cannot load the judge '\\w+:f'",
        ("judges_for_tests:constant",): "it is a int, not a function",
        ("judges_for_tests", ":f"): "must be given as module:function",
        ("./judges_for_tests.py:f", "judges_for_tests.py:f"): "names a file: .* imports it, judges_for_tests:f, and",
    }.items():
        for name in names:
            with pytest.raises(ValueError, match=message):
                import_function(name, "judge")
            assert sys.path == before
