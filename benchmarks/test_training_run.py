"""A run of P3O from the command's own trainer, with a reward that can rise: what ten updates of 1 B
take and bring.

    python -m pytest benchmarks/test_training_run.py

The policy has random weights, made from a configuration, and the reward is the share of a
response's words in the lower half of the vocabulary: 0.5 at the start. Everything else is as users
have it, in fp16 on a GPU.
"""

import json
import random
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.iteration_trainers import PHASES, save_model
from benchmarks.shapes import CUDA, LARGE, TRIAL
from benchmarks.test_iteration import peak_memory
from benchmarks.training_shapes import CONFIG
from fastp3o.config import TOKENS_PER_ROW, PrecisionName
from fastp3o.models.packed_model import PackedModel
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.packing.pack import Packing
from fastp3o.run.names import METRICS
from fastp3o.run.run import Run
from fastp3o.runtime.precision import choose_precision
from fastp3o.training import loop, setup
from fastp3o.training.predicted_memory import Lengths, Model, frozen_memory, update_memory

PROMPTS, K, UPDATES = (64, 4, 10) if LARGE else (2, 2, 2) if TRIAL else (16, 4, 10)
PROMPT, RESPONSE = (350, 40) if LARGE else (9, 5) if TRIAL else (24, 16)
MINIBATCH = PROMPTS // 2
PRECISION: PrecisionName = "fp16" if CUDA else "fp32"
# A step moves a logit by as much as the model is wide.
LEARNING_RATE = 2e-5 if LARGE else 3e-4


def lower_half(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """The reward: the share of words w0, w1, ... below half of the vocabulary. It is tried with
    other words, too.
    """
    numbers = [
        [int(word[1:]) for word in text.split() if word[1:].isdigit()] for text in completions
    ]
    return [
        sum(number < CONFIG.vocab_size // 2 for number in one) / max(len(one), 1) for one in numbers
    ]


def two_kinds_of_words(model: PreTrainedModel) -> None:
    """Moves the embeddings of both halves apart by half of their deviation: among random ones no
    update could find the half that a word is in, but for each word anew.
    """
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    weight = embeddings.weight.data
    way = (
        torch.randn(weight.shape[1], device=weight.device, dtype=weight.dtype).sign()
        * weight.std()
        / 4
    )
    weight[: CONFIG.vocab_size // 2] += way
    weight[CONFIG.vocab_size // 2 :] -= way


def test_run_of_fastp3o(benchmark, tmp_path):
    """`rewards`: the mean of each update. Seconds of each update by phase are those of the median
    update.
    """
    save_model(CONFIG, tmp_path / "model", two_kinds_of_words)
    with peak_memory() as peak:
        benchmark.pedantic(train, args=(tmp_path,))
    updates = [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    packing = Packing(min(TOKENS_PER_ROW, MINIBATCH * (PROMPT + K * RESPONSE)))
    row = Lengths.full_row(packing, prompt=PROMPT, response=RESPONSE, responses_per_prompt=K)
    seconds = {
        f"{phase}_s": median([update[f"seconds_{phase}"] for update in updates]) for phase in PHASES
    }
    benchmark.extra_info |= {
        "level": "training run",
        "implementation": "fastp3o",
        "D": CONFIG.hidden_size,
        "V": CONFIG.vocab_size,
        "layers": CONFIG.num_hidden_layers,
        "dtype": PRECISION,
        "P": PROMPTS,
        "K": K,
        "prompt": PROMPT,
        "response": RESPONSE,
        "rewards": [update["reward"] for update in updates],
        "kl": [update["kl"] for update in updates],
        "skipped_steps": sum(update.get("skipped_steps", 0) for update in updates),
        **seconds,
        "peak_gb": peak[0] / 1e9,
        "predicted_gb": predicted_bytes(tmp_path / "model", row) / 1e9,
    }


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def train(folder: Path) -> None:
    generator = random.Random(0)
    words = (generator.choices(range(1, CONFIG.vocab_size), k=PROMPT) for _ in range(PROMPTS))
    prompts = [" ".join(f"w{index}" for index in prompt) for prompt in words]
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    )
    config = P3OConfig(
        model=str(folder / "model"),
        output_dir=str(folder / "run"),
        prompts=str(folder / "prompts.jsonl"),
        reward=f"{__name__}:{lower_half.__name__}",
        updates=UPDATES,
        prompts_per_update=PROMPTS,
        prompts_per_minibatch=MINIBATCH,
        responses_per_prompt=K,
        max_prompt_tokens=PROMPT,
        max_response_tokens=RESPONSE,
        learning_rate=LEARNING_RATE,
        warmup_steps=0,
        kl_coef=0.01,
        precision=PRECISION,
        samples_every=0,
        log_rollouts=0,
        report_to="none",
    )
    with (
        # Which would take longer than the updates.
        patch.object(Run, "save_state"),
        patch.object(Run, "save_model"),
        # A run refuses a tokenizer with a token that the model lacks, such as this one's end.
        patch.object(setup, "load_tokenizer", AutoTokenizer.from_pretrained),
    ):
        loop.train(config)


def predicted_bytes(model: Path, row: Lengths) -> int:
    """By the formula of `fastp3o memory`: the larger one of the policy's update and the reference's
    pass, beside which the weights of the other and the masters stay.
    """
    with torch.device("meta"):
        sizes = Model(
            PackedModel(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)))
        )
    precision = choose_precision(PRECISION, PRECISION)
    return update_memory(sizes, row, precision).peak + frozen_memory(sizes, row, precision).weights
