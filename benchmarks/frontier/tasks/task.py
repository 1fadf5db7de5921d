"""The start of all runs of a task: a fine-tuned policy, a reward model and the prompts of a
language, made once.

python -m benchmarks.frontier.tasks.task      makes the ten starts, in about two minutes each
"""

import argparse
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from benchmarks.frontier.tasks import synthetic
from benchmarks.frontier.tasks.language import Language
from fastp3o.data.loading import load_prompts
from fastp3o.models.loading import load_policy
from fastp3o.models.tokenizer import load_tokenizer
from fastp3o.packing.pack import Packing
from fastp3o.rewards.reward import Reward, load_reward
from fastp3o.rollouts.groups import make_prompts, texts
from fastp3o.rollouts.transformers_sampler import TransformersSampler
from fastp3o.training import reward_model, sft
from fastp3o.training.reward_model import RewardModelConfig
from fastp3o.training.sft import SFTConfig

RESULTS = Path(__file__).parents[2] / "results" / "frontier"
# Ten languages of one kind. Eight have one seed each and give the results; on the other two
# settings are chosen.
TASKS = tuple(f"many_languages-{number}" for number in range(10))

# Of every run, whatever its algorithm.
SETTINGS: dict[str, Any] = {
    "updates": 20,
    "inner_epochs": 4,
    "sampler": "engine",
    "max_prompt_tokens": 16,
    "max_response_tokens": 32,
    "tokens_per_row": 2048,
    "eval_at": "2,4,7,10,14",
    "eval_responses_per_prompt": 4,
    "eval_batch_size": 128,
}


@dataclass(frozen=True)
class Task:
    """Folders of models and data, and the reward's mean and standard deviation over the fine-tuned
    policy's samples.
    """

    name: str
    policy: str
    reward_model: str
    prompts: str
    eval_prompts: str
    reward_mean: float
    reward_std: float
    gold: Callable[[list[str], list[str]], list[float]]  # the true utility

    def gold_reward(self) -> Reward:
        return lambda groups: torch.tensor(self.gold(*texts(groups))).view(len(groups), -1)


def make(name: str, folder: Path) -> Task:
    """The task in `folder`, of which the parts that are there are read."""
    number, own = TASKS.index(name), folder / name
    start = folder / "starts" / str(number)
    if not (own / "prompts.eval.jsonl").exists():
        synthetic.make_data(own, number)
    if not (start / "rewards.json").exists():
        make_start(number, own, start)
    return Task(
        name=name,
        policy=str(start / "policy"),
        reward_model=str(start / "reward_model"),
        prompts=str(own / "prompts.train.jsonl"),
        eval_prompts=str(own / "prompts.eval.jsonl"),
        gold=Language(number).utility,
        **json.loads((start / "rewards.json").read_text()),
    )


def make_start(number: int, data: Path, start: Path) -> None:
    """Trains the policy and the reward model of a language in `data`, and keeps both in bf16 in
    `start`.
    """
    policy = fine_tune(data, number)
    rewards = learn_preferences(data, policy, number)
    keep(AutoModelForCausalLM.from_pretrained(policy), policy, start / "policy")
    keep(
        AutoModelForSequenceClassification.from_pretrained(rewards), policy, start / "reward_model"
    )
    statistics = reward_statistics(
        str(start / "policy"), str(start / "reward_model"), data / "prompts.train.jsonl"
    )
    (start / "rewards.json").write_text(json.dumps(statistics, indent=2) + "\n")
    if not as_recorded(number, start):
        print(
            f"start {number} differs from the recorded one: its runs cannot be paired with those of runs.jsonl"
        )


def as_recorded(number: int, start: Path) -> bool:
    """Whether a start has the bits of the one that the recorded runs began with."""
    recorded = json.loads((RESULTS / "starts.json").read_text())[str(number)]
    return all(
        hashlib.sha256((start / part / "model.safetensors").read_bytes()).hexdigest()
        == recorded[part]
        for part in ("policy", "reward_model")
    )


def keep(model: PreTrainedModel, policy: str, folder: Path) -> None:
    """Writes a model in bf16, as recorded runs began with, with the policy's tokenizer."""
    model.bfloat16().save_pretrained(folder)
    load_tokenizer(policy).save_pretrained(folder)


def fine_tune(folder: Path, seed: int) -> str:
    """Fine-tunes the model of `folder`/init on its demonstrations."""
    output = folder / "sft"
    shutil.rmtree(output, ignore_errors=True)
    config = SFTConfig(
        model=str(folder / "init"),
        output_dir=str(output),
        train_data=str(folder / "sft.jsonl"),
        seed=seed,
        **synthetic.SFT,
    )
    sft.train(config)
    return str(output / "model")


def learn_preferences(folder: Path, policy: str, seed: int) -> str:
    """Trains a reward model on the preferences in `folder`, starting from the policy."""
    output = folder / "reward_model"
    shutil.rmtree(output, ignore_errors=True)
    config = RewardModelConfig(
        model=policy,
        output_dir=str(output),
        train_data=str(folder / "preferences.train.jsonl"),
        eval_data=str(folder / "preferences.eval.jsonl"),
        seed=seed,
        **synthetic.REWARD_MODEL,
    )
    reward_model.train(config)
    return str(output / "model")


def reward_statistics(policy: str, rewards: str, prompts: Path) -> dict[str, float]:
    """Mean and deviation of the rewards of two responses to each of 256 training prompts, with seed
    0.
    """
    tokenizer = load_tokenizer(policy)
    examples, _ = load_prompts(str(prompts), tokenizer, limit=256, max_prompt_tokens=192)
    sampler = TransformersSampler(
        load_policy(policy), tokenizer, max_response_tokens=32, batch_size=64
    )
    groups = sampler(make_prompts(examples[:]), 2, 0)
    deviation, mean = torch.std_mean(load_scores(rewards, policy)(groups))
    return {"reward_mean": mean.item(), "reward_std": deviation.item()}


def load_scores(rewards: str, policy: str) -> Reward:
    """The reward model's scores of responses of a policy, in fp32 on the CPU."""
    return load_reward(
        rewards,
        load_tokenizer(policy),
        device=torch.device("cpu"),
        dtype=torch.float32,
        packing=Packing(tokens_per_row=8192),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frontier.tasks.task",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/frontier"), help="Folder of data, models and logs."
    )
    folder = parser.parse_args().runs
    torch.set_num_threads(1)
    for name in TASKS:
        make(name, folder)


if __name__ == "__main__":
    main()
