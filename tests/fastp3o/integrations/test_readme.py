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
    prompts = [f"Say {word}:" for word in ("tree", "house", "river", "cloud", "stone", "apple", "eagle", "ocean")]
    return {"MODEL": tiny_model, "PROMPTS": prompts, "reward": varied}


def test_the_index_of_tests_names_tests():
    here = Path(__file__).parent
    named = re.findall(r"([\w/]+\.py)::(\w+)", here.joinpath("conftest.py").read_text())
    assert len(named) == 14
    for path, test in named:
        text = (ROOT / path if "/" in path else here / path).read_text()
        assert f"def {test}(" in text, f"{path} has no {test}"


@pytest.mark.parametrize("number", range(len(SECTIONS)), ids=TITLES)
def test_a_page_has_at_most_60_lines(number):
    assert len(SECTIONS[number].splitlines()) <= 60


def test_the_plain_loop_is_fastp3os_own_update(names, tiny_model):
    (code,) = re.findall(r"```python\n(.*?)```", SECTIONS[1], re.DOTALL)
    lines = [line for line in code.splitlines() if line]
    assert len(lines) <= 40
    run("Plain loop", names)
    batch = PaddedBatch(names["ids"], names["batch"]["attention_mask"], names["response_mask"], 2)
    groups = batch_groups(batch, names["rewards"])
    assert_own_update(names["policy"].state_dict(), tiny_model, [[groups]], 2, kl_coef=0.05)


@pytest.mark.parametrize("title", [title for title in TITLES if title.startswith("TRL")])
def test_trls_examples_run(names, title):
    pytest.importorskip("trl", reason="the extra `integrations` is not installed")
    run(title, names)
