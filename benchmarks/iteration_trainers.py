"""Iterations of fastp3o's P3O and of TRL's GRPO and online DPO: the same model, prompts and
lengths, seconds by phase.

All train with AdamW at one learning rate, a reference model for the KL and one minibatch an epoch:
as many optimizer steps as epochs. Nobody saves within an iteration. No response ends early, for the
tokenizer's end-of-sequence is no token of the model, and prompts are of one length, so nobody pads.

On a CPU all is fp32. On a GPU each trains in its default: fastp3o's P3O in fp16 weights with fp32
copies, TRL's in fp32 weights under bf16 autocast.

What differs: fastp3o forms packed rows of its default size, checks its rounding and writes its
metrics, TRL logs nothing; GRPO clips ratios of tokens; online DPO takes no old log-probs, for TRL
samples anew for every forward and backward pass, two responses to a prompt only. An iteration of it
has as many optimizer steps as the others'.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from benchmarks.measure import CLOCK
from benchmarks.peers import AbsentError
from benchmarks.shapes import CUDA, DEVICE
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.run import names as run_files
from fastp3o.run import phases as run_phases
from fastp3o.run.run import Run
from fastp3o.training import loop, setup

PHASES = ("rollout", "reward", "logprobs", "update")
EPOCHS = 4
LEARNING_RATE = 1e-6
KL_COEF = 0.05
PRECISION = "fp16, TRL bf16 autocast" if CUDA else "float32"

Seconds = dict[str, float]  # of an iteration: `seconds`; of ours also PHASES, and `other`


class Task(NamedTuple):
    """model: folder with model and tokenizer. prompts: texts. response: tokens of each of the K
    responses. passes: of a minibatch through TRL's models; fastp3o's rows say by themselves how
    many.
    """

    model: Path
    prompts: list[str]
    response: int
    K: int
    passes: int = 1


wall_clock = run_phases.now


def clock() -> float:
    """Seconds since whenever, by CLOCK."""
    return time.process_time() if CLOCK == "processor" else wall_clock()


class Stopwatch:
    """iterations: seconds of each. after_first: called between the first iteration and the second."""

    def __init__(self, after_first: Callable[[], object] = lambda: None) -> None:
        self.after_first = after_first
        self.iterations: list[float] = []
        self.since = clock()

    def end_iteration(self) -> None:
        self.iterations.append(clock() - self.since)
        if len(self.iterations) == 1:
            self.after_first()
        self.since = clock()


def save_model(
    config: PretrainedConfig,
    folder: Path,
    change: Callable[[PreTrainedModel], object] = lambda _: None,
) -> None:
    """A random model, and a tokenizer of words w0, w1, ... whose end-of-sequence lies beyond the
    model's vocabulary. change: is called with the model before it is saved.
    """
    V = config.vocab_size
    words = {f"w{index}": index for index in range(V)} | {"<end>": V}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="w0"
    ).save_pretrained(folder)
    tokens = {"bos_token_id": None, "eos_token_id": V, "pad_token_id": 0}
    torch.manual_seed(0)
    with DEVICE:
        # On a GPU in half the bytes: whoever loads it says its own dtype.
        dtype = torch.bfloat16 if CUDA else torch.float32
        model = AutoModelForCausalLM.from_config(
            type(config)(**config.to_dict() | tokens), dtype=dtype
        )
    change(model)
    model.save_pretrained(folder)


def characters(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """The reward: as short as Python allows, and of other values for other responses."""
    return [float(len(completion)) for completion in completions]


def fastp3o_p3o(task: Task, iterations: int, folder: Path, stopwatch: Stopwatch) -> list[Seconds]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in task.prompts))
    config = P3OConfig(
        model=str(task.model),
        output_dir=str(folder / "run"),
        prompts=str(prompts),
        reward=f"{__name__}:{characters.__name__}",
        updates=iterations,
        prompts_per_update=len(task.prompts),
        prompts_per_minibatch=len(task.prompts),
        responses_per_prompt=task.K,
        inner_epochs=EPOCHS,
        max_prompt_tokens=2048 - task.response,
        max_response_tokens=task.response,
        learning_rate=LEARNING_RATE,
        kl_coef=KL_COEF,
        precision="fp16" if CUDA else "fp32",
        samples_every=0,
        log_rollouts=0,
        report_to="none",
    )

    def report_update(*arguments: Any) -> None:
        report(*arguments)
        stopwatch.end_iteration()

    report = loop.report_update
    with (
        patch.object(loop, "report_update", report_update),
        patch.object(run_phases, "now", clock),
        # Which would take longer than what is measured.
        patch.object(Run, "save_state"),
        patch.object(Run, "save_model"),
        # A run refuses a tokenizer with a token that the model lacks, such as this one's end.
        patch.object(setup, "load_tokenizer", AutoTokenizer.from_pretrained),
    ):
        loop.train(config)
    updates = map(json.loads, (folder / "run" / run_files.METRICS).read_text().splitlines())
    found = []
    for seconds, update in zip(stopwatch.iterations, updates, strict=True):
        phases = {phase: update[f"seconds_{phase}"] for phase in PHASES}
        found.append({"seconds": seconds, **phases, "other": seconds - sum(phases.values())})
    return found


def trl_grpo(task: Task, iterations: int, folder: Path, stopwatch: Stopwatch) -> list[Seconds]:
    from trl import GRPOConfig, GRPOTrainer

    settings = GRPOConfig(
        **trainer_figures(task, iterations, folder),
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=len(task.prompts) * task.K // task.passes,
        steps_per_generation=task.passes,
        num_iterations=EPOCHS,
        num_generations=task.K,
        max_completion_length=task.response,
        beta=KL_COEF,
    )
    trainer = GRPOTrainer(str(task.model), reward_funcs=characters, args=settings, **data(task))
    return timed(trainer, stopwatch)


def trl_online_dpo(
    task: Task, iterations: int, folder: Path, stopwatch: Stopwatch
) -> list[Seconds]:
    if task.K != 2:
        raise AbsentError("two responses to a prompt only")
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    settings = OnlineDPOConfig(
        **trainer_figures(task, iterations, folder),
        per_device_train_batch_size=len(task.prompts) // task.passes,
        max_new_tokens=task.response,
        max_length=2048,
        temperature=1.0,
        beta=KL_COEF,
    )
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    trainer = OnlineDPOTrainer(model, reward_funcs=characters, args=settings, **data(task))
    return timed(trainer, stopwatch)


def trainer_figures(task: Task, iterations: int, folder: Path) -> dict[str, object]:
    """Settings of transformers' Trainer."""
    return {
        "output_dir": str(folder),
        "max_steps": iterations * EPOCHS,
        "gradient_accumulation_steps": task.passes,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": CUDA,
        "gradient_checkpointing": False,
        "use_cpu": not CUDA,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def data(task: Task) -> dict[str, object]:
    tokenizer = AutoTokenizer.from_pretrained(task.model, padding_side="left")
    return {
        "train_dataset": Dataset.from_dict({"prompt": task.prompts}),
        "processing_class": tokenizer,
    }


def timed(trainer: Trainer, stopwatch: Stopwatch) -> list[Seconds]:
    """Trains, and ends an iteration with the last of its epochs."""

    class Steps(TrainerCallback):
        def on_step_end(
            self,
            args: TrainingArguments,
            state: TrainerState,
            control: TrainerControl,
            **_: object,
        ) -> None:
            if state.global_step % EPOCHS == 0:
                stopwatch.end_iteration()

    trainer.add_callback(Steps())
    stopwatch.since = clock()
    trainer.train()
    return [{"seconds": seconds} for seconds in stopwatch.iterations]


TRAINERS: dict[str, Callable[[Task, int, Path, Stopwatch], list[Seconds]]] = {
    "fastp3o P3O": fastp3o_p3o,
    "TRL GRPO": trl_grpo,
    "TRL online DPO": trl_online_dpo,
}
