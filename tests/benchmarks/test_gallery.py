"""The page of options by model and GPU says what `fastp3o memory` says, of options that training
takes.
"""

import json
import re
import sys
from itertools import cycle, takewhile
from pathlib import Path

import pytest

from benchmarks.pages import gallery
from benchmarks.pages.sources import records
from fastp3o.__main__ import main
from fastp3o.cli import parse
from fastp3o.objectives.config.p3o import P3OConfig

PAGE = Path(__file__).parents[2].joinpath("fastp3o", "training", "gallery.md").read_text()
MODELS = records()[gallery.SHAPES]["models"]


def table(name: str) -> list[list[str]]:
    """The rows of a section, header first."""
    rows = PAGE.partition(f"<!-- {name} -->\n")[2].partition("<!--")[0].splitlines()
    cells = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows]
    return [cells[0], *cells[2:]]


HEADER, *ROWS = table("gallery")
OPTIONS = dict(table("options")[1:])


@pytest.mark.parametrize("name", MODELS)
def test_the_sizes_are_the_models(name):
    """Another number of layers, heads or rows would give another number of parameters than the hub
    shows.
    """
    shape = MODELS[name]["config"]
    assert gallery.sizes(tuple(shape.items()), 0).parameters == MODELS[name]["parameters"]


def said(arguments: list[str], monkeypatch, capsys) -> tuple[float, bool]:
    """What the command says: GB at most, and whether they fit."""
    monkeypatch.setattr(sys, "argv", ["fastp3o", "memory", *arguments])
    main()
    ((gb, does),) = re.findall(
        r"([\d.]+) GB at most: this (fits|does not fit)", capsys.readouterr().out
    )
    return float(gb), does == "fits"


@pytest.mark.parametrize(("name", "machine"), [*zip(MODELS, cycle(gallery.MACHINES), strict=False)])
def test_the_command_says_what_the_page_says_and_that_ways_before_it_do_not_fit(
    name, machine, tmp_path, monkeypatch, capsys
):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]["config"]))
    (row,) = (row for row in ROWS if row[0] == name)
    way, _, gb = row[HEADER.index(machine)].partition(": ")
    gpu_gb, gpus = gallery.MACHINES[machine]
    lengths = [f"--{option}={value}" for option, value in gallery.MEANS.items()]
    given = ["--model", str(tmp_path), *lengths, "--gpu_gb", str(gpu_gb), "--gpus", str(gpus)]
    given += ["--precision", "bf16-autocast"] if "gemma" in name else []
    for before in takewhile(lambda one: one != way, gallery.ways(gallery.MACHINES[machine])):
        assert not said([*given, *OPTIONS[before].split()], monkeypatch, capsys)[1]
    if way != gallery.NONE_FITS:
        assert said([*given, *OPTIONS[way].split()], monkeypatch, capsys) == (float(gb), True)


def test_training_takes_the_options(monkeypatch):
    needed = ["--model", "m", "--output_dir", "o", "--prompts", "p", "--reward", "r"]
    assert OPTIONS.keys() == gallery.WAYS.keys()
    for way, typed in OPTIONS.items():
        monkeypatch.setattr(sys, "argv", ["p3o", *needed, *typed.split()])
        config = parse(P3OConfig)
        wanted = gallery.COMMON | gallery.WAYS[way]
        assert {name: getattr(config, name) for name in wanted} == wanted
