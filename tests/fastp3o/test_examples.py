"""The examples run as they stand, on a tiny model, and are short."""

import runpy
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


@pytest.mark.parametrize(
    ("name", "printed", "left"),
    [
        ("own_reward", "eval/reward", ["runs/sums/model", "runs/sums/best"]),
        ("lora_chat", "after step", ["runs/chat/model", "runs/chat/adapter/adapter_model.safetensors"]),
        ("dpo_then_p3o", "response_length", ["runs/dpo/model", "runs/dpo_p3o/model"]),
    ],
)
def test_an_example_runs(tiny_model, tmp_path, monkeypatch, capsys, name, printed, left):
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATE
    model = tmp_path / "start"
    model.mkdir()
    for file in Path(tiny_model).iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(model)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", str(model)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert printed in capsys.readouterr().out
    assert all(Path(path).exists() for path in left)


def test_examples_are_short():
    paths = sorted(EXAMPLES.glob("*.py"))
    assert len(paths) == 3
    assert all(len(path.read_text().splitlines()) <= 30 for path in paths)
