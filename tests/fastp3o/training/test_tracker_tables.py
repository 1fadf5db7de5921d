"""Tables of TensorBoard are read as TensorBoard reads them. W&B and trackio are stand-ins that record what they get: no
test has them installed.
"""

import html
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas
import pytest
from accelerate import tracking
from accelerate.utils import LoggerType
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from fastp3o.stages.online import train
from fastp3o.training.rollout_log import LoggedGroup, read_updates
from fastp3o.training.tracker_tables import markdown
from tests.fastp3o.runs import config

COLUMNS = ["prompt", "response", "reward", "reward/varied", "reward/vowels", "log_ratio", "tokens", "finished"]
REWARDS = {"reward": "rewards_for_tests:varied,rewards_for_tests:vowels", "updates": 2}


def cells(page: str) -> list[list[str]]:
    """The texts of a page's table, row by row."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    found = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
    return [[html.unescape(re.sub(r"<br ?/?>", "\n", cell)) for cell in row] for row in found]


def expected_rows(groups: list[LoggedGroup]) -> list[list[Any]]:
    return [
        [group.prompt, one.text, one.reward, *one.parts.values(), one.log_ratio, len(one.ids), str(one.finished)]
        for group in groups
        for one in group.responses
    ]


@pytest.mark.parametrize(
    "text",
    [
        "a | b || c",
        "**bold** _it_ `code` ~~x~~ [a](http://b) ![i](j)",
        "<b>x</b> <script>alert(1)</script> &amp; &#33;",
        "one\ntwo\n\n# three\n- four\n1. five",
        "back\\slash \\| \\n",
        "http://example.org me@example.org",
        "| --- |",
        "Ünïcödé – 漢字",
    ],
)
def test_a_text_is_shown_as_it_is(text: str):
    page = markdown_to_safe_html(markdown(["prompt", "a|b"], [["before", text], [text, None], ["", 0.123456]]))
    assert cells(page) == [["prompt", "a|b"], ["before", text], [text, ""], ["", "0.1235"]]
    assert not re.search(r"<(b|a|strong|em|code|img|script|h1|ul|ol|p)\b", page)


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
    for table, groups in zip(tables, read_updates(Path("run/rollouts.jsonl.gz")), strict=True):
        (text,) = table.tensor_proto.string_val
        head, *rows = cells(markdown_to_safe_html(text.decode()))
        assert head == COLUMNS
        expected = expected_rows(groups)
        assert [row[0] for row in rows] == [row[0] for row in expected]
        assert [float(row[2]) for row in rows] == pytest.approx([row[2] for row in expected], abs=1e-3)


class RecordingRun:
    """What W&B's and trackio's runs get."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int]] = []

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        pass


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_wandb_and_trackio_get_tables(workplace: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch, name: str):
    run, module = RecordingRun(), ModuleType(name)
    module.init = lambda project: run
    module.config = SimpleNamespace(update=lambda values, allow_val_change: None)
    if name == "wandb":
        module.Table = lambda columns, data, dataframe: pandas.DataFrame(data, columns=columns)
    else:  # which ignores columns
        module.Table = lambda *, dataframe: dataframe
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType(name)])
    train(config(tiny_model, "run", **REWARDS, report_to=name))
    tables = [(values["train/rollouts"], step) for values, step in run.logged if "train/rollouts" in values]
    assert [step for _, step in tables] == [1, 2]
    assert [step for _, step in run.logged] == sorted(step for _, step in run.logged)  # W&B drops earlier steps
    for (table, _), groups in zip(tables, read_updates(Path("run/rollouts.jsonl.gz")), strict=True):
        assert list(table.columns) == COLUMNS
        assert table.values.tolist() == expected_rows(groups)
