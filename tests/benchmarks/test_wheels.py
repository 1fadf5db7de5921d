"""Wheels in pieces are joined; one that lacks a piece is left out."""

import os
import zipfile
from pathlib import Path

import pytest

from benchmarks.wheels import gather

PIECES = ("aa", "ab", "ac")


@pytest.fixture
def sent(tmp_path: Path) -> list[Path]:
    """A whole wheel, and one in three pieces, out of order and in two folders."""
    for name in ("small", "large"):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as wheel:
            wheel.writestr("module.py", os.urandom(3000))
    content, files = (tmp_path / "large.whl").read_bytes(), [tmp_path / "small.whl"]
    for number, piece in reversed(list(enumerate(PIECES))):
        folder = tmp_path / f".whl{number % 2}"
        folder.mkdir(exist_ok=True)
        files.append(folder / f"large.whl.piece-{piece}")
        files[-1].write_bytes(
            content[1000 * number : 1000 * (number + 1) if piece != "ac" else None]
        )
    return files


def test_pieces_are_joined(sent, tmp_path):
    (tmp_path / "whole").mkdir()
    gather(tmp_path / "whole", sent)
    for name in ("small.whl", "large.whl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.parametrize("missing", PIECES)
def test_a_wheel_that_lacks_a_piece_is_left_out(sent, tmp_path, missing, capsys):
    (tmp_path / "whole").mkdir()
    gather(tmp_path / "whole", [file for file in sent if not file.name.endswith(missing)])
    assert [file.name for file in (tmp_path / "whole").iterdir()] == ["small.whl"]
    assert "large.whl: pieces are missing" in capsys.readouterr().err
