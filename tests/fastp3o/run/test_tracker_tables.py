"""Tables of TensorBoard are read as TensorBoard reads them. W&B is a stand-in that records what it gets: no
test has them installed.
"""

import html
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas
import pytest
from accelerate import Accelerator, tracking
from accelerate.utils import LoggerType
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from fastp3o.run.log import LoggedGroup, LoggedResponse, read_updates
from fastp3o.run.report import Reporter
from fastp3o.training.loop import train
from tests.fastp3o.runs import config

COLUMNS = ["prompt", "response", "reward", "reward/varied", "reward/vowels", "log_ratio", "tokens", "finished"]
REWARDS = {"reward": "rewards_for_tests:varied,rewards_for_tests:vowels", "updates": 2}


def expected_rows(groups: list[LoggedGroup]) -> list[list[Any]]:
    return [
        [group.prompt, one.text, one.reward, *one.parts.values(), one.log_ratio, len(one.ids), str(one.finished)]
        for group in groups
        for one in group.responses
    ]


def test_tensorboard_has_tables_and_short_tags(workplace: Path, tiny_model: str):
    train(config(tiny_model, "run", **REWARDS, report_to="tensorboard", eval_prompts="prompts.jsonl"))
    events = EventAccumulator("run/trackers")
    events.Reload()
    tags = events.Tags()
    assert {"train/reward", "train/reward/varied", "eval/reward/vowels", "eval/kl"} <= set(tags["scalars"])
    assert all(len(tag) < 40 for tag in tags["scalars"])
    assert tags["tensors"] == ["train/rollouts/text_summary"]
    tables = events.Tensors("train/rollouts/text_summary")
    assert [table.step for table in tables] == [1, 2]
    for table, groups in zip(tables, read_updates(Path("run/rollouts.jsonl")), strict=True):
        (text,) = table.tensor_proto.string_val
        shown = re.fullmatch(r"<pre><code>(.*)</code></pre>", markdown_to_safe_html(text.decode()), re.DOTALL)
        rows = [json.loads(line) for line in html.unescape(shown[1]).splitlines()]
        assert rows == [COLUMNS, *expected_rows(groups)]


def test_tensorboard_shows_a_text_as_it_is(tmp_path: Path):
    text = "a | b **bold** <b>x</b> [c](http://b) &amp; \n\n# one\n- two `code`\x1b[0m | --- |"
    tracker = SimpleNamespace(name="tensorboard", log=lambda values, step: pages.extend(values.values()))
    pages: list[str] = []
    reporter = Reporter(Accelerator(cpu=True), tmp_path, stage="P3O", first_step=0, steps=1)
    reporter.accelerator.trackers = [tracker]
    reporter.rollouts(1, [LoggedGroup(1, text, None, [LoggedResponse(text, [1], 0.5, {}, None, finished=True)])])
    page = markdown_to_safe_html(pages[0])
    assert json.loads(html.unescape(page).splitlines()[1]) == [text, text, 0.5, None, 1, "True"]
    assert not re.search(r"<(b|a|strong|em|img|script|h1|ul|ol|p)\b", page)


class RecordingRun:
    """What W&B's runs get."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int]] = []

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        pass


def test_wandb_gets_tables(workplace: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch):
    run, module = RecordingRun(), ModuleType("wandb")
    module.init = lambda project: run
    module.config = SimpleNamespace(update=lambda values, allow_val_change: None)
    module.Table = lambda columns, data, dataframe: pandas.DataFrame(data, columns=columns)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType("wandb")])
    train(config(tiny_model, "run", **REWARDS, report_to="wandb"))
    tables = [(values["train/rollouts"], step) for values, step in run.logged if "train/rollouts" in values]
    assert [step for _, step in tables] == [1, 2]
    assert [step for _, step in run.logged] == sorted(step for _, step in run.logged)  # W&B drops earlier steps
    for (table, _), groups in zip(tables, read_updates(Path("run/rollouts.jsonl")), strict=True):
        assert list(table.columns) == COLUMNS
        assert table.values.tolist() == expected_rows(groups)
