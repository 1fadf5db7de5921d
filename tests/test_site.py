"""The page site: it builds without a warning, its links lead somewhere, and its reference has all
that is public.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from fastp3o.__main__ import STAGES

ROOT = Path(__file__).parents[1]
SITE = ROOT / ".github" / "site"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"site_{name}", SITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_option_of_every_command_is_in_the_reference():
    reference = loaded("reference")
    pages = reference.reference()
    for command in STAGES:
        for config in reference.choices(command).values():
            page, _, heading = reference.page_of(config.__name__).partition("#")
            text = pages[f"reference/options/{page}"]
            if not heading:
                assert not [f.name for f in fields(config) if f"| `{f.name}` |" not in text], (
                    command
                )
                continue
            part = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
            base_page = reference.DIFFERENCES[page.removesuffix(".md")]
            base = reference.choices(reference.WHOLE[base_page])[base_page]
            assert f"`{config.__name__}`" in part
            in_base = {f.name for f in fields(base)} - {"objective"}
            names = {f.name for f in fields(config)} - {"objective"}
            listed = {row.split("`")[1] for row in part.splitlines() if row.startswith("| `")}
            gone = (
                set(part.rpartition("Does not have ")[2].split("`")[1::2])
                if "Does not have" in part
                else set()
            )
            assert (in_base - gone) | listed == names, heading


def test_every_public_name_is_in_the_reference():
    reference = loaded("reference")
    pages = reference.reference()
    for module in reference.public_modules():
        text = pages[f"reference/{module}.md"]
        for name, home in reference.public_names(module).items():
            assert (
                f"::: {home}.{name}\n" in text
                or f"[`{name}`]" in text
                or f"{module}.{name}" in pages["reference/README.md"]
            )


def test_links_that_lead_nowhere_are_found(tmp_path):
    links = loaded("links")
    assert links.broken(tmp_path), "a folder without pages is no site"
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "index.html").write_text('<h2 id="there">x</h2><a href="../a.html#top">a</a>')
    (tmp_path / "a.html").write_text(
        '<p id="top"><a href="b/#there">b</a><a href="https://example.org">c</a><img src="b/">'
    )
    assert links.broken(tmp_path) == []
    (tmp_path / "c.html").write_text(
        '<a href="b/#gone">b</a><img src="d.svg"><a href="a.html">a</a>'
    )
    assert links.broken(tmp_path) == ["c.html -> b/#gone", "c.html -> d.svg"]


def test_it_builds_without_a_warning_and_its_links_lead_somewhere(tmp_path):
    missing = [
        name
        for name in ("mkdocs", "material", "mkdocstrings_handlers")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install '.[site]'")
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("pages are those that git tracks, and the tree is no clone")
    environment = {**os.environ, "FASTP3O_PYTHON": sys.executable, "FASTP3O_SITE": str(tmp_path)}
    built = subprocess.run(
        ["bash", "scripts/site.sh"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "kl_coef" in (tmp_path / "search" / "search_index.json").read_text()
    assert (tmp_path / "reference" / "fastp3o_kernels" / "index.html").read_text().count(
        "linear_p3o_loss"
    ) > 1
