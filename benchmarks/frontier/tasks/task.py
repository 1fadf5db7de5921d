"""The start of all runs of a task: a fine-tuned policy, a reward model and prompts, made once."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.frontier.tasks import synthetic
from benchmarks.frontier.tasks.groups import (
    DOCSTRINGS,
    LANGUAGES,
    LONG_PROMPTS,
    MANY_LANGUAGES,
    RETUNED,
    SIZES,
    TASKS,
    WRONG_LABELS,
    base_of,
    group_of,
)
from benchmarks.frontier.tasks.language import Language, LongPrompts
from fastp3o.data import load_prompts
from fastp3o.models.loading import load_policy, load_tokenizer
from fastp3o.packing.pack import Packing
from fastp3o.rewards.reward import Reward, load_reward
from fastp3o.rollouts.groups import Group, make_prompts, texts
from fastp3o.rollouts.transformers_sampler import TransformersSampler
from fastp3o.stages import reward_model, sft
from fastp3o.stages.reward_model import RewardModelConfig
from fastp3o.stages.sft import SFTConfig

REPOSITORY = Path(__file__).parents[3]
COMMON: dict[str, Any] = {"report_to": "none", "precision": "fp32"}

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
# Enough to pass the KLs for which the optimum is known.
TASK_SETTINGS[RETUNED] = TASK_SETTINGS[LANGUAGES] | {"updates": 20, "eval_at": "1,2,3,5,7,10,14", "sampler": "engine"}
TASK_SETTINGS[MANY_LANGUAGES] = TASK_SETTINGS[RETUNED] | {"eval_at": "2,4,7,10,14"}
TASK_SETTINGS |= dict.fromkeys([*WRONG_LABELS, *SIZES], TASK_SETTINGS[RETUNED])
# Larger policies move faster.
TASK_SETTINGS["size_6m"] = TASK_SETTINGS[RETUNED] | {"updates": 14, "eval_at": "1,2,3,5,7,10"}
TASK_SETTINGS[LONG_PROMPTS] = TASK_SETTINGS[RETUNED] | synthetic.LONG_LIMITS


@dataclass(frozen=True)
class Task:
    """Folders of models and data, and the reward's mean and standard deviation over the fine-tuned policy's samples."""

    name: str
    policy: str
    reward_model: str
    prompts: str
    eval_prompts: str
    reward_mean: float
    reward_std: float
    gold: Callable[[list[str], list[str]], list[float]] | None  # the true utility, if it is known

    def gold_reward(self) -> Reward | None:
        if self.gold is None:
            return None
        return lambda groups: torch.tensor(self.gold(*texts(groups))).view(len(groups), -1)


def make(name: str, folder: Path) -> Task:
    """The task, read from `folder` if it was made before."""
    made = folder / name / "task.json"
    if not made.exists():
        given = what_is_given(name, folder)
        made.write_text(json.dumps(given | statistics_of(name, given), indent=2))
    group = group_of(name)
    kind = LongPrompts if group == LONG_PROMPTS else Language
    gold = None if group == DOCSTRINGS else kind(number_of(name)).utility
    return Task(name=name, gold=gold, **json.loads(made.read_text()))


def statistics_of(name: str, given: dict[str, str]) -> dict[str, float]:
    if group_of(name) == MANY_LANGUAGES:
        return json.loads((start_of(number_of(name)) / "rewards.json").read_text())
    return reward_statistics(given)


def number_of(name: str) -> int:
    """The task's number in its group, which is the seed of its language."""
    return TASKS[group_of(name)].index(name)


def what_is_given(name: str, folder: Path) -> dict[str, str]:
    group, seed, own = group_of(name), number_of(name), folder / name
    if group == DOCSTRINGS:
        return make_docstrings(own)
    if group in (LANGUAGES, RETUNED):
        return make_language(own, seed)
    if group == MANY_LANGUAGES:
        synthetic.make_data(own, seed)
        return given_start(own, seed)
    if group == LONG_PROMPTS:
        return make_language(own, seed, LongPrompts, synthetic.LONG_LIMITS)
    base = make(base_of(name), folder)
    given = {part: getattr(base, part) for part in ("policy", "reward_model", "prompts", "eval_prompts")}
    data = folder / base.name
    if group in WRONG_LABELS:
        return given | {"reward_model": learn_wrong_labels(own, data, base.policy, WRONG_LABELS[group], seed)}
    return given | {"policy": fine_tune_size(own, data, SIZES[group], seed)}


def make_language(
    folder: Path, seed: int, kind: type[Language] = Language, limits: dict[str, Any] = synthetic.LIMITS
) -> dict[str, str]:
    synthetic.make_data(folder, seed, kind)
    policy = fine_tune(folder, folder, seed, **limits)
    return {"policy": policy, "reward_model": learn_preferences(folder, folder, policy, seed, **limits)} | prompts_in(
        folder
    )


def given_start(folder: Path, number: int) -> dict[str, str]:
    """The committed models of a language, with the prompts of `synthetic.make_data`."""
    return {part: str(start_of(number) / part) for part in ("policy", "reward_model")} | prompts_in(folder)


def start_of(number: int) -> Path:
    """The folder of a language's committed models."""
    return REPOSITORY / "benchmarks" / "results" / "frontier" / "starts" / str(number)


def prompts_in(folder: Path) -> dict[str, str]:
    return {"prompts": str(folder / "prompts.train.jsonl"), "eval_prompts": str(folder / "prompts.eval.jsonl")}


def learn_wrong_labels(folder: Path, data: Path, policy: str, share: float, seed: int) -> str:
    """A reward model from preferences with this share of wrong labels; those that evaluate it stay."""
    folder.mkdir(parents=True, exist_ok=True)
    preferences = synthetic.read_jsonl(data / "preferences.train.jsonl")
    preferences = synthetic.with_wrong_labels(preferences, share, np.random.default_rng([seed, 2]))
    synthetic.write_jsonl(folder / "preferences.train.jsonl", preferences)
    shutil.copy(data / "preferences.eval.jsonl", folder)
    return learn_preferences(folder, folder, policy, seed)


def fine_tune_size(folder: Path, data: Path, parameters: int, seed: int) -> str:
    """A policy of another size on a language's demonstrations."""
    shape, tokenizer = synthetic.SHAPES[parameters], synthetic.make_tokenizer()
    tokenizer.save_pretrained(folder / "init")
    synthetic.make_model(tokenizer, seed, shape).save_pretrained(folder / "init")
    return fine_tune(folder, data, seed, learning_rate=shape.learning_rate)


def fine_tune(folder: Path, data: Path, seed: int, **settings: Any) -> str:
    """Fine-tunes the model of `folder`/init on the demonstrations in `data`."""
    output = folder / "sft"
    shutil.rmtree(output, ignore_errors=True)
    sft.train(
        SFTConfig(
            model=str(folder / "init"),
            output_dir=str(output),
            train_data=str(data / "sft.jsonl"),
            seed=seed,
            **COMMON,
            **(synthetic.SFT | settings),
        )
    )
    return str(output / "model")


def learn_preferences(folder: Path, data: Path, policy: str, seed: int, **settings: Any) -> str:
    """Trains a reward model on the preferences in `data`, starting from the policy."""
    output = folder / "reward_model"
    shutil.rmtree(output, ignore_errors=True)
    reward_model.train(
        RewardModelConfig(
            model=policy,
            output_dir=str(output),
            train_data=str(data / "preferences.train.jsonl"),
            eval_data=str(data / "preferences.eval.jsonl"),
            seed=seed,
            **COMMON,
            **(synthetic.REWARD_MODEL | settings),
        )
    )
    return str(output / "model")


def make_docstrings(folder: Path) -> dict[str, str]:
    """The quickstart's data and models, with a second pass of fine-tuning only on responses, to learn to end them."""
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
            **COMMON,
        )
    )
    return {
        "policy": str(policy / "model"),
        "reward_model": str(folder / "reward_model" / "model"),
        "prompts": str(folder / "data" / "prompts.train.jsonl"),
        "eval_prompts": str(folder / "data" / "prompts.eval.jsonl"),
    }


def reward_statistics(given: dict[str, str]) -> dict[str, float]:
    deviation, mean = torch.std_mean(sampled_rewards(given))
    return {"reward_mean": mean.item(), "reward_std": deviation.item()}


def sampled_rewards(given: dict[str, str], prompts: int = 256) -> Tensor:
    """Scores [prompts, 2] of the reward model on responses of the fine-tuned policy to some training prompts."""
    groups = sample(
        given["policy"],
        given["prompts"],
        limit=prompts,
        max_prompt_tokens=192,
        max_response_tokens=32,
        responses_per_prompt=2,
        batch_size=64,
    )
    return load_scores(given["reward_model"], given["policy"])(groups)


def sample(
    policy: str,
    prompts: str,
    *,
    limit: int,
    max_prompt_tokens: int,
    max_response_tokens: int,
    responses_per_prompt: int,
    batch_size: int,
) -> list[Group]:
    """Responses of a checkpoint to the first prompts of a file, with seed 0."""
    tokenizer = load_tokenizer(policy)
    examples, _ = load_prompts(prompts, tokenizer, limit=limit, max_prompt_tokens=max_prompt_tokens)
    sampler = TransformersSampler(
        load_policy(policy), tokenizer, max_response_tokens=max_response_tokens, batch_size=batch_size
    )
    return sampler(make_prompts(examples[:]), responses_per_prompt, 0)


def load_scores(reward_model: str, policy: str) -> Reward:
    """The reward model's scores of responses of a policy, in fp32 on the CPU."""
    return load_reward(
        reward_model,
        load_tokenizer(policy),
        device=torch.device("cpu"),
        dtype=torch.float32,
        packing=Packing(tokens_per_row=8192),
    )
