"""The examples run as they stand, on a tiny model."""

import ast
import json
import re
import runpy
import shutil
import socket
import sys
from pathlib import Path

import pandas as pd
import pytest
from transformers import AutoTokenizer

from fastp3o.rollouts.turns.environment import Environments
from fastp3o.run import report as reporting
from fastp3o.run.plot import draw_progress

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
NOTEBOOK_PATH = EXAMPLES / "first_run.ipynb"
NOTEBOOK = json.loads(NOTEBOOK_PATH.read_text())
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{{ eos_token if message.role == 'assistant' else '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PRINTED_AND_LEFT = {
    "own_reward": ("eval/reward", ["runs/sums/model", "runs/sums/best"]),
    "lora_chat": ("after step", ["runs/chat/model", "runs/chat/adapter/adapter_model.safetensors"]),
    "files_environment": ("reward/nav", ["runs/desk/model"]),
    "dpo_then_p3o": ("response_length", ["runs/dpo/model", "runs/dpo_p3o/model"]),
}


def test_every_example_is_run_here_or_in_a_file_of_its_name():
    elsewhere = {
        path.stem.removeprefix("test_")
        for path in (EXAMPLES.parents[1] / "tests").rglob("test_*.py")
    }
    for path in EXAMPLES.glob("*.py"):
        assert path.stem in PRINTED_AND_LEFT.keys() | elsewhere, path


@pytest.mark.parametrize(
    "path", [EXAMPLES / f"{name}.py" for name in PRINTED_AND_LEFT], ids=lambda path: path.stem
)
def test_an_example_runs(tiny_model, tmp_path, monkeypatch, capsys, path):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, "start")
    tokenizer = AutoTokenizer.from_pretrained("start")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained("start")
    monkeypatch.setattr(sys, "argv", [path.name, "start"])
    runpy.run_path(str(path), run_name="__main__")
    printed, left = PRINTED_AND_LEFT[path.stem]
    assert printed in capsys.readouterr().out
    assert all(Path(name).exists() for name in left)


def shown_by(code: str, names: dict) -> str:
    """Runs a cell -> what a notebook shows of its last line's value."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, NOTEBOOK_PATH.name, "exec"), names)
    if not isinstance(last, ast.Expr):
        return ""
    return eval(
        compile(ast.Expression(last.value), NOTEBOOK_PATH.name, "eval"), names
    )._repr_html_()


def test_the_notebook_runs_in_a_folder_of_its_own_and_shows_what_was_learned(tmp_path, monkeypatch):
    """Each cell as a notebook runs it, which shows the value of its last line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reporting, "draw_progress", draw_progress)  # which tests leave out
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("it needs no network"))
    names: dict = {}
    cells = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    with pd.option_context("display.max_colwidth", 50):  # which it changes
        shown = [html for html in (shown_by(code, names) for code in cells) if html]
    losses, run, metrics, beside = shown
    assert "<th>loss</th>" in losses
    assert '<img src="data:image/png;base64,' in run
    assert "<th>eval/reward</th>" in metrics
    assert all(text in beside for text in (*names["before"], *names["after"]))
    before, after = (names["cheerful"](None, names[when]) for when in ("before", "after"))
    assert sum(after) > sum(before) + 2, (names["before"], names["after"])


def test_the_notebook_links_to_pages_that_exist_and_uses_public_names():
    cells = {
        kind: [c for c in NOTEBOOK["cells"] if c["cell_type"] == kind]
        for kind in ("markdown", "code")
    }
    links = re.findall(
        r"\]\((?!https?:)([^)#]+)\)",
        "".join(line for c in cells["markdown"] for line in c["source"]),
    )
    assert len(links) >= 3
    assert all((EXAMPLES / link).exists() for link in links), links
    code = "".join(line for c in cells["code"] for line in c["source"])
    assert {*re.findall(r"from fastp3o([\w.]*) import", code)} == {""}, (
        "names of the front page alone"
    )


def test_the_desk_pays_each_part_once_and_takes_its_files_with_it():
    desk = runpy.run_path(str(EXAMPLES / "files_environment.py"))["Desk"]
    environments = Environments("files_environment:Desk", desk)
    assert (sum(environments.weights.values()), environments.columns) == (
        pytest.approx(1),
        ["answers"],
    )
    (one,), texts = environments.begin([{"answers": {"name": "Ada", "city": "New York"}}])
    assert texts == ["desk/\n"]
    turns = "open form, save, cd .., cd desk, cd desk, open form, set name Ada, set name Alan, set job ?, save, "
    turns += "set name Ada, set city New York, save ../out, save, done"
    steps = [environments.step([one], [turn])[0] for turn in turns.split(", ")]
    paid = [{name: gain for name, gain in step.rewards.items() if gain} for step in steps]
    half = {"form": 0.5}
    assert paid == [
        {},
        {},
        {},
        {"nav": 1},
        {},
        {"ui": 1},
        half,
        {},
        {},
        {"file": 1},
        {},
        half,
        {},
        {},
        {"goal": 1},
    ]
    assert [step.done for step in steps] == [False] * 14 + [True]
    assert steps[-1].observation == "name: Ada\ncity: New York\n"
    assert sorted(path.name for path in one.folder.rglob("*")) == ["desk", "form", "saved"]
    environments.close([one])
    assert not one.folder.exists()
