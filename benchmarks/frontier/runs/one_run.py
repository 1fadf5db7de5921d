"""One run of the plan -> one line of runs.jsonl."""

import hashlib
import json
import os
import shutil
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState

from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.tasks.groups import group_of
from benchmarks.frontier.tasks.offset_reward import OffsetReward
from benchmarks.frontier.tasks.offsets import OFFSETS
from benchmarks.frontier.tasks.task import TASK_SETTINGS, Task, load_scores
from fastp3o.objectives.config import OnlineConfig
from fastp3o.objectives.online_dpo import OnlineDPOConfig
from fastp3o.objectives.p3o import P3OConfig
from fastp3o.objectives.ppo import PPOConfig
from fastp3o.stages.online import train
from fastp3o.training.log_files import EVALUATIONS

# Optimizer steps of an inner epoch.
MINIBATCHES = 4


def train_and_record(run: Run, task: Task, folder: Path, updates: int | None = None) -> dict[str, Any]:
    """Trains in `folder`/run.name, where the finished model stays, and returns the run with what came out.

    updates: stop after so many, with the bits that the whole run has there; None for the whole run.
    """
    # Workers outlive a command that was stopped: its runs must not write where those of the next one do.
    output, log_file = folder / f"{run.name}.{os.getpid()}", folder / f"{run.name}.{os.getpid()}.log.txt"
    folder.mkdir(parents=True, exist_ok=True)
    # Runs of one process must not share what accelerate keeps.
    AcceleratorState._reset_state(reset_partial_state=True)
    started = time.perf_counter()
    with log_file.open("w") as log, redirect_stdout(log), redirect_stderr(log):
        train(configuration(run, task, output, updates), reward=offset_reward(run, task), gold=task.gold_reward())
    shutil.rmtree(output / "state")
    log_file.rename(output / "log.txt")
    finished = folder / run.name
    shutil.rmtree(finished, ignore_errors=True)
    output.rename(finished)
    return asdict(run) | {
        "seconds": round(time.perf_counter() - started, 1),
        "threads": torch.get_num_threads(),
        "sha256": hashlib.sha256((finished / "model" / "model.safetensors").read_bytes()).hexdigest(),
        "evaluations": rounded_evaluations(finished),
    }


def offset_reward(run: Run, task: Task) -> OffsetReward:
    reward = load_scores(task.reward_model, task.policy)
    return OffsetReward(reward, task.reward_mean, task.reward_std, OFFSETS[run.offset], run.offset_sd)


def configuration(run: Run, task: Task, output: Path, updates: int | None = None) -> OnlineConfig:
    settings = TASK_SETTINGS[group_of(run.task)] | {
        "model": task.policy,
        "reward": task.reward_model,
        "prompts": task.prompts,
        "eval_prompts": task.eval_prompts,
        "output_dir": str(output),
        "learning_rate": run.learning_rate,
        "kl_coef": run.kl_coef,
        "seed": run.seed,
        "responses_per_prompt": run.responses_per_prompt,
        "prompts_per_update": run.prompts_per_update,
        "precision": "fp32",
        "report_to": "none",
        "samples_every": 0,
    }
    if updates is not None:
        settings["updates"] = updates
    # As many optimizer steps, whatever the number of prompts.
    settings["prompts_per_minibatch"] = run.prompts_per_update // MINIBATCHES
    if run.algorithm == "ppo":
        return PPOConfig(**settings, **PPO_SETTINGS)
    if run.algorithm == "dpo":
        return OnlineDPOConfig(**settings)
    clipping, _, scaling = run.algorithm.partition("-")
    return P3OConfig(**settings, clipping=clipping, reward_scaling=scaling or "none")


# Rewards have unit deviation already; the running deviation would divide PPO's by that of the offset. And values must
# be free to reach an offset of tens.
PPO_SETTINGS = {"reward_scaling": "none", "reward_clip": 0.0, "value_clip_range": 10.0, "critic_learning_rate": 2e-3}


def rounded_evaluations(folder: Path) -> list[dict[str, float]]:
    """The run's evaluations, to six significant digits, which is beyond their standard errors."""
    lines = (folder / EVALUATIONS).read_text().splitlines()
    return [{name: float(f"{value:.6g}") for name, value in json.loads(line).items()} for line in lines]
