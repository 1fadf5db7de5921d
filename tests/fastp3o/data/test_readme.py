"""The layouts that README.md promises are those of the code, in their order, and its examples load."""

import json
import re
from pathlib import Path

from fastp3o.data.layouts import LAYOUTS, find_layout

README = Path(__file__).parents[3] / "fastp3o" / "data" / "README.md"


def test_every_layout_is_documented_in_its_order_and_its_example_can_be_read():
    documented = re.findall(r"^\| ([a-z, ]+) \| (\d) \| `(\{.*\})` \|$", README.read_text(), re.MULTILINE)
    for layout, (names, responses, example) in zip(LAYOUTS, documented, strict=True):
        assert (", ".join(layout.fields), layout.response_count) == (names, int(responses))
        record = json.loads(example)
        assert find_layout(record, int(responses)) is layout
        assert layout.prompt(record).value
        assert len(layout.responses(record)) == int(responses)
