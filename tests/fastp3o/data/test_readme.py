"""The layouts that README.md promises are those of the code, and its examples load."""

import json
import re
from pathlib import Path

import pytest

from fastp3o.data.layouts import LAYOUTS, find_layout

README = Path(__file__).parents[3] / "fastp3o" / "data" / "README.md"
DOCUMENTED = re.findall(r"^\| ([a-z, ]+) \| (\d) \| `(\{.*\})` \|$", README.read_text(), re.MULTILINE)


def test_every_layout_is_documented_in_its_order():
    documented = [(tuple(fields.split(", ")), int(responses)) for fields, responses, _ in DOCUMENTED]
    assert documented == [(layout.fields, layout.response_count) for layout in LAYOUTS]


@pytest.mark.parametrize(("fields", "responses", "example"), DOCUMENTED, ids=[fields for fields, _, _ in DOCUMENTED])
def test_the_example_of_a_layout_can_be_read(fields: str, responses: str, example: str):
    record = json.loads(example)
    layout = find_layout(record, int(responses))
    assert str(layout) == fields.replace(", ", "/")
    assert layout.prompt(record).value
    assert len(layout.responses(record)) == int(responses)
