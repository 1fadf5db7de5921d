"""The pages of the integrations are short, and their code runs as it stands."""

import re
from pathlib import Path

import pytest
import torch

from fastp3o.integrations.padded_pairs import PaddedBatch
from tests.fastp3o.integrations.own_trainer import assert_own_update, batch_groups, varied

ROOT = Path(__file__).parents[3]
SECTIONS = (ROOT / "fastp3o" / "integrations" / "README.md").read_text().split("\n## ")
TITLES = [section.split("\n", 1)[0] for section in SECTIONS]


def run(title: str, names: dict) -> dict:
    (section,) = (section for section in SECTIONS if section.startswith(title))
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(compile(code, title, "exec"), names)
    return names


@pytest.fixture
def names(workplace, tiny_model) -> dict:
    torch.manual_seed(0)
    prompts = [
        f"Say {word}:"
        for word in ("tree", "house", "river", "cloud", "stone", "apple", "eagle", "ocean")
    ]
    return {"MODEL": tiny_model, "PROMPTS": prompts, "reward": varied}


def test_the_plain_loop_is_fastp3os_own_update(names, tiny_model):
    assert max(len(section.splitlines()) for section in SECTIONS) <= 60
    run("Plain loop", names)
    batch = PaddedBatch(names["ids"], names["batch"]["attention_mask"], names["response_mask"], 2)
    groups = batch_groups(batch, names["rewards"])
    assert_own_update(names["policy"].state_dict(), tiny_model, [[groups]], 2, kl_coef=0.05)


@pytest.mark.parametrize("title", [title for title in TITLES if title.startswith("TRL")])
def test_trls_examples_run(names, title):
    pytest.importorskip("trl", reason="the extra `integrations` is not installed")
    run(title, names)
