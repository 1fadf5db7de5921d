"""Tables of rollouts: TensorBoard reads them as Markdown, and W&B has tables of its own."""

import html
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate import Accelerator
from tensorboard.plugin_util import markdown_to_safe_html

from fastp3o.run.log import LoggedGroup, LoggedResponse
from fastp3o.run.report import Reporter


def test_trackers_get_a_row_of_each_response_with_its_text_as_it_is(tmp_path: Path):
    text = "a | b **bold** <b>x</b> [c](http://b) &amp; \n\n# one\n- two `code`\x1b[0m | --- |"
    pages: dict[str, str] = {}
    tables: list[tuple[str, int, list[str], list[list[Any]]]] = []
    tensorboard = SimpleNamespace(name="tensorboard", log=lambda values, step: pages.update(values))
    wandb = SimpleNamespace(
        name="wandb", log_table=lambda name, columns, data, step: tables.append((name, step, columns, data))
    )
    reporter = Reporter(Accelerator(cpu=True), tmp_path, stage="P3O", first_step=0, steps=7)
    reporter.accelerator.trackers = [tensorboard, wandb]
    responses = [
        LoggedResponse(text, [1, 2], 0.5, {"reward/varied": 2.0}, None, finished=True),
        LoggedResponse("cut", [1], -1.0, {"reward/varied": None}, 0.25, finished=False),
    ]
    reporter.rollouts(7, [LoggedGroup(7, text, None, responses)])
    columns = ["prompt", "response", "reward", "reward/varied", "log_ratio", "tokens", "finished"]
    rows = [[text, text, 0.5, 2.0, None, 2, "True"], [text, "cut", -1.0, None, 0.25, 1, "False"]]
    assert tables == [("train/rollouts", 7, columns, rows)]
    page = markdown_to_safe_html(pages["train/rollouts"])
    shown = re.fullmatch(r"<pre><code>(.*)</code></pre>", page, re.DOTALL)
    assert [json.loads(line) for line in html.unescape(shown[1]).splitlines()] == [columns, *rows]
    assert not re.search(r"<(b|a|strong|em|img|script|h1|ul|ol|p)\b", page)
