"""Iterations of fastp3o's P3O and of TRL's GRPO and online DPO: the same model, prompts and lengths, seconds by phase.

All train with AdamW at one learning rate, a reference model for the KL and one minibatch an epoch: as many
optimizer steps as epochs. Nobody saves within an iteration. No response ends early, for the tokenizer's
end-of-sequence is no token of the model, and prompts are of one length, so nobody pads.

On a CPU all is fp32. On a GPU each trains in its default: fastp3o's P3O in fp16 weights with fp32 copies, TRL's in fp32
weights under bf16 autocast.

What differs: fastp3o forms packed rows of its default size, checks its rounding and writes its metrics, TRL logs
nothing; GRPO clips ratios of tokens; online DPO takes no old log-probs, for TRL samples anew for every forward and
backward pass, two responses to a prompt only. An iteration of it has as many optimizer steps as the others'.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
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
    LlamaConfig,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
)

from benchmarks.measure import CLOCK
from benchmarks.peers import AbsentError
from benchmarks.shapes import CUDA
from fastp3o.objectives.p3o import P3OConfig
from fastp3o.run import names as run_files
from fastp3o.run import report as reporting
from fastp3o.training import loop, setup

PHASES = ("rollout", "reward", "logprobs", "update")
EPOCHS = 4
LEARNING_RATE = 1e-6
KL_COEF = 0.05
PRECISION = "fp16, TRL bf16 autocast" if CUDA else "float32"

Seconds = dict[str, float]  # of each of PHASES, and "other"


class Task(NamedTuple):
    """model: folder with model and tokenizer. prompts: texts. response: tokens of each of the K responses. passes: of a
    minibatch through TRL's models; fastp3o's rows say by themselves how many.
    """

    model: Path
    prompts: list[str]
    response: int
    K: int
    passes: int = 1


wall_clock = reporting.now


def clock() -> float:
    """Seconds since whenever, by CLOCK."""
    return time.process_time() if CLOCK == "processor" else wall_clock()


class Stopwatch:
    """iterations: of each, seconds by phase; a phase that interrupts another is not counted with it.

    after_first: called between the first iteration and the second.
    """

    def __init__(self, after_first: Callable[[], object] = lambda: None) -> None:
        self.after_first = after_first
        self.iterations: list[Seconds] = []
        self.phases = ["other"]
        self.begin()

    def begin(self) -> None:
        self.seconds, self.since = dict.fromkeys((*PHASES, "other"), 0.0), clock()

    def count(self, phase: str) -> None:
        """The time since anything was counted."""
        now = clock()
        self.seconds[phase] += now - self.since
        self.since = now

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.count(self.phases[-1])
        self.phases.append(phase)
        yield
        self.count(self.phases.pop())

    def end_iteration(self) -> None:
        self.count("other")
        self.iterations.append(self.seconds)
        if len(self.iterations) == 1:
            self.after_first()
        self.begin()


def save_model(config: LlamaConfig, folder: Path) -> None:
    """A random model, and a tokenizer of words w0, w1, ... whose end-of-sequence lies beyond the model's vocabulary."""
    V = config.vocab_size
    words = {f"w{index}": index for index in range(V)} | {"<end>": V}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="w0").save_pretrained(folder)
    tokens = {"bos_token_id": None, "eos_token_id": V, "pad_token_id": 0}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**config.to_dict() | tokens), dtype=torch.float32).save_pretrained(
        folder
    )


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
        patch.object(reporting, "now", clock),
        # A run refuses a tokenizer with a token that the model lacks, such as this one's end.
        patch.object(setup, "load_tokenizer", AutoTokenizer.from_pretrained),
    ):
        loop.train(config)
    updates = map(json.loads, (folder / "run" / run_files.METRICS).read_text().splitlines())
    return [
        with_phases(sum(seconds.values()), {phase: update[f"seconds_{phase}"] for phase in PHASES})
        for seconds, update in zip(stopwatch.iterations, updates, strict=True)
    ]


def with_phases(total: float, phases: Seconds) -> Seconds:
    return phases | {"other": total - sum(phases.values())}


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
    return timed(
        trainer,
        stopwatch,
        {
            "training_step": "update",
            "_prepare_inputs": "other",
            "_generate": "rollout",
            "_calculate_rewards": "reward",
            "_get_per_token_logps_and_entropies": update_or_logprobs,
        },
    )


def trl_online_dpo(task: Task, iterations: int, folder: Path, stopwatch: Stopwatch) -> list[Seconds]:
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
    return timed(
        trainer,
        stopwatch,
        {
            "training_step": "update",
            "_generate": "rollout",
            "_calculate_rewards_from_functions": "reward",
            "_forward": update_or_logprobs,
        },
    )


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
    return {"train_dataset": Dataset.from_dict({"prompt": task.prompts}), "processing_class": tokenizer}


def update_or_logprobs() -> str:
    """The phase of a forward pass."""
    return "update" if torch.is_grad_enabled() else "logprobs"


def timed(trainer: Trainer, stopwatch: Stopwatch, methods: dict[str, str | Callable[[], str]]) -> list[Seconds]:
    """Trains, with the phase of each of the trainer's methods by its name."""
    for name, phase in methods.items():
        setattr(trainer, name, in_phase(stopwatch, getattr(trainer, name), phase))
    trainer.add_callback(Steps(stopwatch))
    trainer.train()
    return stopwatch.iterations


def in_phase(
    stopwatch: Stopwatch, method: Callable[..., object], phase: str | Callable[[], str]
) -> Callable[..., object]:
    @wraps(method)
    def timed_method(*arguments: object, **options: object) -> object:
        with stopwatch(phase if isinstance(phase, str) else phase()):
            return method(*arguments, **options)

    return timed_method


class Steps(TrainerCallback):
    def __init__(self, stopwatch: Stopwatch):
        self.stopwatch = stopwatch

    def on_optimizer_step(self, *_: object, **__: object) -> None:
        """Between training_step and this, gradients are clipped and the optimizer makes its step."""
        self.stopwatch.count("update")

    def on_step_end(self, _: object, state: Any, *__: object, **___: object) -> None:
        if state.global_step % EPOCHS == 0:
            self.stopwatch.end_iteration()


TRAINERS: dict[str, Callable[[Task, int, Path, Stopwatch], list[Seconds]]] = {
    "fastp3o P3O": fastp3o_p3o,
    "TRL GRPO": trl_grpo,
    "TRL online DPO": trl_online_dpo,
}
