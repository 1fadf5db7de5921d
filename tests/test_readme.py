"""README.md is true and short: its code runs as it stands, and its links, files, folders and flags
exist.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from fastp3o.__main__ import COMMANDS, main, stage_of_objective

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
KERNELS = ROOT / "kernels" / "fastp3o_kernels"
PAGES = [
    str(page.relative_to(ROOT))
    for folder in ("", ".github", "fastp3o", "kernels", "scripts", "benchmarks", "tests")
    for page in sorted((ROOT / folder).glob("**/*.md" if folder else "*.md"))
]


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, "" for blocks that name none."""
    fenced = (block.split("\n", 1) for block in README.split("```")[1::2])
    return [text for name, text in fenced if name == language]


def test_the_loss_before_and_after_is_the_same():
    code = blocks("python")[1]
    before, after = code.split("# After")
    torch.manual_seed(0)
    names: dict = {}
    exec(compile(before, "README.md", "exec"), names)
    loss = names["loss"]
    expected = torch.autograd.grad(loss, [names["hidden"], names["weight"]])
    exec(compile("# After" + after.partition("# P3O in its place")[0], "README.md", "exec"), names)
    torch.testing.assert_close(names["loss"], loss)
    for tensor, gradient in zip((names["hidden"], names["weight"]), expected, strict=True):
        assert gradient.abs().sum() > 0
        torch.testing.assert_close(tensor.grad, gradient)
    exec(compile(code, "README.md", "exec"), names)
    assert names["loss"].isfinite()
    assert names["counts"]


def test_its_blocks_are_well_typed(tmp_path):
    """What an editor with a type checker says of the code that a reader copies."""
    for number, code in enumerate(blocks("python")):
        (tmp_path / f"block_{number}.py").write_text(code)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "--cache-dir",
    ]
    files = sorted(map(str, tmp_path.glob("block_*.py")))
    told = subprocess.run(
        [*command, str(tmp_path / "cache"), *files], cwd=ROOT, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str):
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        path, _, heading = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page} links to {link}"
        if heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert heading in {
                re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings
            }, link


def test_pip_is_asked_for_extras():
    """ci.yml lets pip look for them."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for page in (*PAGES, *(ROOT / "fastp3o").glob("**/*.py")):
        for asked in re.findall(
            r"pip install '?([\w.-]+(?:\[[\w,]+\])?)", (ROOT / page).read_text()
        ):
            assert set(re.findall(r"[\w.-]+", asked)) <= {".", "fastp3o", *extras}, page


NAMES_OURS = ("README.md", "fastp3o/README.md", ".github/CONTRIBUTING.md", "benchmarks/README.md")


@pytest.mark.parametrize(
    "page", [*NAMES_OURS, "fastp3o/objectives/README.md", "fastp3o/evaluation/README.md"]
)
def test_files_that_it_names_exist(page: str):
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:[\w.]+/)*[\w.]+\.(?:py|md|sh|txt|json)|(?:[\w.]+/)+)`", text)
    named += re.findall(r"`(scripts/\w+\.py) ", text)
    assert named or page == "README.md"  # which names them by links
    for name in named:
        assert any(
            (folder / name).exists() for folder in ((ROOT / page).parent, ROOT, ROOT / "scripts")
        ), name


@pytest.mark.parametrize("page", PAGES)
def test_scripts_and_commands_that_it_names_exist(page: str):
    if page == ".github/CHANGELOG.md":  # which names what has gone, too
        return
    text = (ROOT / page).read_text()
    for script in re.findall(r"scripts/[\w/]+\.(?:py|sh)", text):
        assert (ROOT / script).exists(), script
    for command in re.findall(
        r"(?:`|-m |^ {4}|^(?=fastp3o \w+ --))fastp3o ([a-z]\w*)", text, re.MULTILINE
    ):
        assert command in COMMANDS or stage_of_objective(command), command


def test_contributing_names_every_test_that_holds_a_rule():
    """Those at the top level, and whatever reads sources or pages instead of running what is to be
    tested.
    """
    tests = [*(ROOT / "tests").rglob("test_*.py"), ROOT / "tests" / "fastp3o" / "conftest.py"]
    holding = {
        str(path.relative_to(ROOT))
        for path in tests
        if path.parent.name == "tests"
        or path.name in ("test_readme.py", "test_pages.py", "conftest.py")
        or "ast.parse(" in path.read_text()
    }
    text = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
    section = text.partition("## What CI holds")[2].partition("\n## ")[0]
    assert holding - set(re.findall(r"`(tests/[\w/]+\.py)`", section)) == set()


def test_the_tree_names_folders_that_exist():
    (tree,) = blocks("")
    assert len(tree.splitlines()) <= 10
    for folder in re.findall(r"[\w/]+/(?= |$)", "\n".join(line[:29] for line in tree.splitlines())):
        assert any((parent / folder).is_dir() for parent in (ROOT, ROOT / "fastp3o", KERNELS)), (
            folder
        )


def test_commands_use_flags_that_their_scripts_have(monkeypatch, capsys):
    lines = "\n".join(blocks("bash")).replace("\\\n", "")
    commands = re.findall(r"^fastp3o (\w+) (.*)$", lines, re.MULTILINE)
    assert len(commands) == 4
    for script, flags in commands:
        monkeypatch.setattr(sys, "argv", ["fastp3o", script, "--help", "all"])
        with pytest.raises(SystemExit):
            main()
        help_text = capsys.readouterr().out
        for flag in re.findall(r"--\w+", flags):
            assert f"{flag} " in help_text, f"{script} has no {flag}"


def test_it_is_read_in_two_minutes_and_has_its_figures():
    lines = README.splitlines()
    assert len(lines) <= 230
    # GitHub cuts wider code, and editors wrap wider text; links and figures of tables and records
    # may be wider.
    wide = [
        line
        for line in lines
        if len(line) > 88 and not line.startswith(("|", "<img")) and "<!--" not in line
    ]
    assert not wide
    figures = re.findall(r'<img src="([^"]+)"', README)
    assert len(figures) == 2
    assert all((ROOT / figure).exists() for figure in figures)
