"""Two small models that judge at a server: one of the tests' size, which is trained here to end
with a verdict, and Gemma 3 270M, which examples in the question lead to one.
"""

import json
import os
import random
import string
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import pad
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

GEMMA = Path(os.environ.get("FASTP3O_REAL_MODEL") or Path(__file__).parents[4] / ".real" / "gemma")


class SmallJudge(NamedTuple):
    """model: a folder. template: of --judge_template."""

    model: str
    template: str


# --- of the tests' size ---------------------------------------------------------------------------

SHORT = "$prompt A:$first B:$second"
# As an untrained policy of bytes responds.
CHARACTERS = string.printable[:95] + 30 * "\ufffd"


def tiny_judge(tokenizer: PreTrainedTokenizerBase, folder: Path) -> SmallJudge:
    """Always answers in the same form; which letter depends on the texts, as chance has it."""
    with_template = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<end>")
    with_template.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    torch.manual_seed(0)
    # vLLM has no attention of 16 dimensions on a CPU.
    sizes = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "intermediate_size": 128}
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    settings = LlamaConfig(
        vocab_size=len(tokenizer),
        num_hidden_layers=2,
        max_position_embeddings=2048,
        **sizes,
        **special,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(settings)
    train_on(model, [example(random.Random(seed), with_template) for seed in range(96)])
    model.save_pretrained(folder)
    with_template.save_pretrained(folder)
    return SmallJudge(str(folder), SHORT)


def example(draw: random.Random, tokenizer: PreTrainedTokenizerBase) -> tuple[list, list]:
    """The ids of a question about random texts, and of a random verdict."""
    texts = ["".join(draw.choices(CHARACTERS, k=draw.randrange(7))) for _ in range(2)]
    prompt = f"Say {draw.choice(['tree', 'house', 'river', 'ocean'])}:"
    question = f"{prompt} A:{texts[0]} B:{texts[1]}"
    answer = f"So [[{draw.choices('ABC', [4, 4, 1])[0]}]]<end>"
    return tokenizer(question).input_ids, tokenizer(answer).input_ids


def train_on(model: LlamaForCausalLM, examples: list[tuple[list, list]]) -> None:
    """Until the form is learned, and before the examples' verdicts are known by heart."""
    longest = max(len(question) + len(answer) for question, answer in examples)
    rows = [
        [pad(torch.tensor(ids), (0, longest - len(ids)), value=fill) for ids, fill in both]
        for question, answer in examples
        for both in [((question + answer, 0), ([-100] * len(question) + answer, -100))]
    ]
    ids, labels = (torch.stack(column) for column in zip(*rows, strict=True))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(36):
        for places in torch.randperm(len(ids)).split(32):
            model(ids[places], labels=labels[places]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


# --- a real one -----------------------------------------------------------------------------------

EXAMPLES = """\
Which answer is better?

Question: What is 2 + 3?
[[A]] It is 5.
[[B]] cow cow cow
Better: [[A]]

Question: Name a color.
[[A]] zzzz q
[[B]] Blue.
Better: [[B]]

Question: $prompt
[[A]] $first
[[B]] $second
Better:"""


def gemma_judge(folder: Path) -> SmallJudge:
    """A base model, so that its chat template adds nothing and a line break ends its answer. Skips
    the test without a copy of the model.
    """
    if not (GEMMA / "model.safetensors").exists():
        pytest.skip("needs Gemma 3 270M, in .real or FASTP3O_REAL_MODEL: bash scripts/test_real.sh")
    for file in GEMMA.iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file.resolve())
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    settings = json.loads((GEMMA / "generation_config.json").read_text())
    settings["eos_token_id"] = [1, 107, 108]  # <eos>, one line break, two
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return SmallJudge(str(folder), EXAMPLES)
