"""The examples run as they stand, on a tiny model."""

import runpy
import shutil
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
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


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
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
