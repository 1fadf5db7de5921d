"""The recipes of the objectives' page, run as they stand there on a tiny model, with limits."""

import math
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.fastp3o.runs import metrics, weights
from tests.fastp3o.torchrun import ROOT

PAGE = (ROOT / "fastp3o" / "objectives" / "README.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE.split("## Recipes")[1], re.MULTILINE | re.DOTALL)
PLAIN = "--report_to none --precision fp32 --learning_rate 1e-3"
ONLINE = f"{PLAIN} --updates 2 --prompts_per_update 4 --samples_every 0 --max_response_tokens 6"
SHORT = {
    "ppo.py": ONLINE,
    "p3o.py": ONLINE,
    "preference.py": f"{PLAIN} --max_response_tokens 12 --batch_size 4",
    "generate.py": "--max_response_tokens 6 --keep_unfinished",
}
JUDGE = "def better(prompts, one, two):\n    return ['first' if a > b else 'second' for a, b in zip(one, two)]"


@pytest.fixture
def run_recipe(workplace, tiny_model, tokenizer, monkeypatch):
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained("runs/sft/model")
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).save_pretrained("runs/rm/model")
    for folder in ("runs/sft/model", "runs/rm/model"):
        tokenizer.save_pretrained(folder)
    Path("sft.jsonl").rename("demonstrations.jsonl")
    lines = Path("preferences.jsonl").read_text().splitlines(keepends=True)
    for file, content in (("easy.jsonl", lines[:4]), ("hard.jsonl", lines[4:]), ("my_judge.py", JUDGE)):
        Path(file).write_text("".join(content))

    def run(number: int) -> None:
        for line in BLOCKS[number].replace("\\\n", " ").splitlines():
            _python, script, *flags = shlex.split(line)
            monkeypatch.setattr(sys, "argv", [script, *flags, *SHORT[Path(script).name].split()])
            runpy.run_path(str(ROOT / script), run_name="__main__")

    return run


def test_a_pretraining_mix(run_recipe):
    assert len(BLOCKS) == 3  # each is tested
    run_recipe(0)
    for folder in ("runs/ppo_ptx", "runs/p3o_ptx"):
        first, second = (step["ptx_loss"] for step in metrics(folder))
        assert 0 < second < first


def test_stepwise_dpo_and_a_judge_in_the_place_of_a_reward_model(run_recipe):
    """Each step of DPO starts at its reference, where the loss is log 2, and the second is of the first one's model."""
    run_recipe(1)
    run_recipe(2)
    for folder in ("runs/sdpo1", "runs/sdpo2", "runs/rlaif"):
        assert metrics(folder)[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    one, two = weights("runs/sdpo1"), weights("runs/sdpo2")
    assert any(not torch.equal(one[name], two[name]) for name in one)
