"""What all runs of a task start from: a fine-tuned policy, a reward model and prompts, made once."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.frontier.tasks import synthetic
from benchmarks.frontier.tasks.groups import DOCSTRINGS, LANGUAGES, TASKS
from benchmarks.frontier.tasks.language import Language
from fastp3o.data import load_prompts
from fastp3o.models.loading import load_policy, load_tokenizer
from fastp3o.packing.pack import Packing
from fastp3o.rewards.reward import Reward, load_reward
from fastp3o.rollouts.rollouts import Rollouts
from fastp3o.rollouts.transformers_sampler import TransformersSampler
from fastp3o.stages import reward_model, sft
from fastp3o.stages.reward_model import RewardModelConfig
from fastp3o.stages.sft import SFTConfig

REPOSITORY = Path(__file__).parents[3]

# Settings of every run of a task, whatever its algorithm. The recorded runs were sampled by transformers.
TASK_SETTINGS: dict[str, dict[str, Any]] = {
    LANGUAGES: {
        "updates": 30,
        "inner_epochs": 4,
        "max_prompt_tokens": 16,
        "max_response_tokens": 32,
        "tokens_per_row": 2048,
        "eval_at": "1,2,3,5,7,10,14,20",
        "eval_responses_per_prompt": 4,
        "eval_batch_size": 128,
        "sampler": "transformers",
    },
    DOCSTRINGS: {
        "updates": 10,
        "inner_epochs": 4,
        "max_prompt_tokens": 64,
        "max_response_tokens": 32,
        "tokens_per_row": 2048,
        "missing_eos_penalty": 1.0,
        "eval_at": "1,2,3,5,7",
        "eval_responses_per_prompt": 1,
        "eval_batch_size": 128,
        "eval_limit": 128,
        "sampler": "transformers",
    },
}


@dataclass(frozen=True)
class Task:
    """Folders of what is given, and the reward's mean and standard deviation over samples of the fine-tuned policy."""

    name: str
    policy: str
    reward_model: str
    prompts: str
    eval_prompts: str
    reward_mean: float
    reward_std: float
    gold: Callable[[list[str], list[str]], list[float]] | None  # the utility behind the reward, where it is known

    def gold_reward(self) -> Reward | None:
        if self.gold is None:
            return None
        return lambda rollouts: torch.tensor(self.gold(*rollouts.texts())).view(len(rollouts), -1)


def make(name: str, folder: Path) -> Task:
    """The task, from `folder` where it has been made already."""
    made = folder / name / "task.json"
    seed = TASKS[LANGUAGES].index(name) if name in TASKS[LANGUAGES] else None
    if not made.exists():
        given = make_docstrings(folder / name) if seed is None else make_language(folder / name, seed)
        deviation, mean = torch.std_mean(sampled_rewards(given))
        made.write_text(json.dumps(given | {"reward_mean": mean.item(), "reward_std": deviation.item()}, indent=2))
    gold = None if seed is None else Language(seed).utility
    return Task(name=name, gold=gold, **json.loads(made.read_text()))


def make_language(folder: Path, seed: int) -> dict[str, str]:
    synthetic.make_data(folder, seed)
    common = {"report_to": "none", "precision": "fp32", "seed": seed}
    policy, scorer = folder / "sft", folder / "reward_model"
    for stage in (policy, scorer):
        shutil.rmtree(stage, ignore_errors=True)
    sft.train(
        SFTConfig(
            model=str(folder / "init"),
            output_dir=str(policy),
            train_data=str(folder / "sft.jsonl"),
            **common,
            **synthetic.SFT,
        )
    )
    reward_model.train(
        RewardModelConfig(
            model=str(policy / "model"),
            output_dir=str(scorer),
            train_data=str(folder / "preferences.train.jsonl"),
            eval_data=str(folder / "preferences.eval.jsonl"),
            **common,
            **synthetic.REWARD_MODEL,
        )
    )
    return {
        "policy": str(policy / "model"),
        "reward_model": str(scorer / "model"),
        "prompts": str(folder / "prompts.train.jsonl"),
        "eval_prompts": str(folder / "prompts.eval.jsonl"),
    }


def make_docstrings(folder: Path) -> dict[str, str]:
    """The quickstart's data and models, and a second pass of fine-tuning on responses alone, to learn to end them."""
    subprocess.run(
        ["bash", str(REPOSITORY / "scripts" / "quickstart.sh")],
        env=os.environ | {"FASTP3O_RUN": str(folder.absolute())},
        check=True,
    )
    policy = folder / "sft_on_responses"
    shutil.rmtree(policy, ignore_errors=True)
    sft.train(
        SFTConfig(
            model=str(folder / "sft" / "model"),
            output_dir=str(policy),
            train_data=str(folder / "data" / "sft.train.jsonl"),
            max_prompt_tokens=192,
            max_response_tokens=32,
            tokens_per_row=2048,
            batch_size=64,
            learning_rate=1e-3,
            lr_schedule="cosine",
            warmup_steps=5,
            report_to="none",
            precision="fp32",
        )
    )
    return {
        "policy": str(policy / "model"),
        "reward_model": str(folder / "reward_model" / "model"),
        "prompts": str(folder / "data" / "prompts.train.jsonl"),
        "eval_prompts": str(folder / "data" / "prompts.eval.jsonl"),
    }


def sampled_rewards(given: dict[str, str], prompts: int = 256) -> Tensor:
    """Scores [prompts, 2] of the reward model on responses of the fine-tuned policy to some training prompts."""
    rollouts = sample(
        given["policy"],
        given["prompts"],
        limit=prompts,
        max_prompt_tokens=192,
        max_response_tokens=32,
        responses_per_prompt=2,
        batch_size=64,
    )
    return load_scores(given["reward_model"], given["policy"])(rollouts)


def sample(
    policy: str,
    prompts: str,
    *,
    limit: int,
    max_prompt_tokens: int,
    max_response_tokens: int,
    responses_per_prompt: int,
    batch_size: int,
) -> Rollouts:
    """Responses of a checkpoint to the first prompts of a file, with seed 0."""
    tokenizer = load_tokenizer(policy)
    examples, _ = load_prompts(prompts, tokenizer, limit=limit, max_prompt_tokens=max_prompt_tokens)
    sampler = TransformersSampler(
        load_policy(policy), tokenizer, max_response_tokens=max_response_tokens, batch_size=batch_size
    )
    return sampler(examples["prompt"], examples["prompt_ids"], responses_per_prompt=responses_per_prompt, seed=0)


def load_scores(reward_model: str, policy: str) -> Reward:
    """The reward model's scores of responses of a policy, in fp32 on the CPU."""
    return load_reward(
        reward_model,
        load_tokenizer(policy),
        device=torch.device("cpu"),
        dtype=torch.float32,
        packing=Packing(tokens_per_row=8192),
    )
