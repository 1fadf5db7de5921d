"""Algorithms on a real model, and real people's choices or labels of film reviews: a line of
human_preferences.jsonl or film_reviews.jsonl for each cell that it lacks.

FASTP3O_LONG=1 bash scripts/human_preferences.sh       makes the start, the reward model and the judge
python -m benchmarks.frontier.runs.real_model          a cell is a seed, a weight of the KL and an arm
FASTP3O_LONG=1 bash scripts/film_reviews.sh            a start, a reward model and a gold of reviews
python -m benchmarks.frontier.runs.real_model --task film_reviews
"""

import argparse
import gc
import json
import os
import shutil
import time
from contextlib import redirect_stderr, redirect_stdout
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset
from torch import Tensor

from benchmarks.frontier.runs.records import add_line, lines_of
from benchmarks.frontier.tasks.task import RESULTS
from fastp3o.data.loading import load_prompts
from fastp3o.evaluation.evaluate import EVALUATION, Evaluation
from fastp3o.evaluation.rival import Rival
from fastp3o.models.loading import load_policy
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.reference import SecondModel
from fastp3o.models.tokenizer import load_tokenizer
from fastp3o.objectives.config.online import OBJECTIVES
from fastp3o.objectives.config.preferences import DPOConfig
from fastp3o.packing.pack import Packing
from fastp3o.packing.seeds import derived_seed
from fastp3o.rewards.comparisons import RelativeReward
from fastp3o.rewards.reward import Reward, load_reward, rewarded
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o.rollouts.groups import Group, SamplingSettings, make_prompts
from fastp3o.run.names import METRICS
from fastp3o.sources import InMemory
from fastp3o.training import loop, preferences

SEEDS, KL_COEFS = range(5), (0.05, 0.2, 0.0125)
UPDATES, PROMPTS, RESPONSES, TOKENS = 8, 4, 4, 24
EVAL_PROMPTS, EVAL_RESPONSES = 32, 4
PACKING = Packing(tokens_per_row=1024)


class Task(NamedTuple):
    """What a script of a real model leaves in its folder, by places in that folder."""

    prompts: str  # held out from the policies and from what scores them
    gold: str  # a model; or weights that scripts/polarity.py reads
    stops: tuple[str, ...]  # texts that end a response


TASKS = {
    # The base model writes the next turn after its answer.
    "human_preferences": Task("data/held_out.jsonl", "judge/model", ("\n\nHuman:",)),
    "film_reviews": Task("data/prompts.jsonl", "polarity.json", ()),
}
POLARITY = "scripts/polarity.py:polarity"

START = "start"
# Arm -> the objective, its settings. All online ones search for their rate alike.
COMPARED = "P3O, joint, comparisons"
OFFLINE = "DPO, offline"
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "P3O, joint": ("p3o", {}),
    "P3O, separate": ("p3o", {"clipping": "separate"}),
    "PPO": ("ppo", {"critic_learning_rate": 1e-4}),
    "GRPO, k1": ("grpo", {"kl_estimator": "k1"}),
    "RLOO": ("rloo", {}),
    "online DPO": ("online_dpo", {}),
    OFFLINE: ("dpo", {}),
    COMPARED: ("p3o", {}),
}
# Of both DPOs, whose beta weighs a KL that no reward's deviation has been divided out of: 0.1, the
# paper's, at 0.05.
BETAS_PER_KL_COEF = 2.0
SHARED: dict[str, Any] = {
    "lora_rank": 16,
    "tokens_per_row": 1024,
    "precision": "fp32",
    "report_to": "none",
    "save_minutes": 0.0,
    "learning_rate": 1e-4,
    "max_prompt_tokens": 96,
    "overwrite": True,
}
ONLINE: dict[str, Any] = SHARED | {
    "kl_per_update": 0.3,
    "updates": UPDATES,
    "prompts_per_update": PROMPTS,
    "prompts_per_minibatch": 2,
    "responses_per_prompt": RESPONSES,
    "inner_epochs": 1,
    "max_response_tokens": TOKENS,
    "samples_every": 0,
    "log_rollouts": 0,
}
# As many steps as online, on the comparisons that the reward model learned from.
PAIRS_PER_STEP = 8


class Preferred(RelativeReward):
    """P(a response is better than another) by the scores of a reward model: Bradley and Terry's."""

    def __init__(self, scores: Reward):
        self.scores = scores

    def fingerprint(self) -> str:
        """Runs of the study are not resumed, so that it need not change with the scores."""
        return type(self).__name__

    def matrix(self, groups: list[Group]) -> Tensor:
        scores = self.scores(groups)
        return torch.sigmoid(scores.unsqueeze(2) - scores.unsqueeze(1)) - 0.5


class Inputs:
    """What a task's script has left in a folder: its start, rewards and data, in fp32."""

    def __init__(self, task: Task, folder: Path):
        self.task, self.folder = task, folder
        self.start, self.data = str(folder / "sft" / "model"), folder / "data"
        self.reward_model = str(folder / "reward" / "model")
        self.tokenizer = load_tokenizer(self.start)
        self.rivals: dict[int, Rival] = {}

    @cached_property
    def rewards(self) -> dict[str, Reward]:
        """The reward that trains, and the gold."""
        gold = str(self.folder / self.task.gold)
        if gold.endswith(".json"):
            os.environ["FASTP3O_POLARITY"] = gold
            gold = POLARITY
        names = {"reward": self.reward_model, "gold": gold}
        settings: dict[str, Any] = {
            "device": torch.device("cpu"),
            "dtype": torch.float32,
            "packing": PACKING,
        }
        return {
            name: load_reward(model, self.tokenizer, **settings) for name, model in names.items()
        }

    @cached_property
    def policy(self) -> PackedModel:
        return load_policy(self.start).eval()

    @cached_property
    def prompts(self) -> Dataset:
        held_out = str(self.folder / self.task.prompts)
        return load_prompts(held_out, self.tokenizer, limit=EVAL_PROMPTS, max_prompt_tokens=96)[0]

    def sampler(self, policy: PackedModel) -> EngineSampler:
        stops = SamplingSettings(stops=self.task.stops)
        return EngineSampler(
            policy, self.tokenizer, max_response_tokens=TOKENS, batch_size=64, settings=stops
        )

    def rival(self, seed: int) -> Rival:
        """The start's responses to the held-out prompts, the same for all arms of a seed."""
        if seed not in self.rivals:
            sampled = derived_seed(seed, EVALUATION)
            prompts = make_prompts(self.prompts[:])
            groups = self.sampler(self.policy)(prompts, EVAL_RESPONSES, sampled)
            responses = [group.responses for group in groups]
            self.rivals[seed] = Rival(responses, rewarded(self.rewards, groups))
        return self.rivals[seed]

    def evaluate(self, policy: PackedModel, seed: int) -> dict[str, float]:
        """`Evaluation`'s metrics, with win rates against the start's responses of the same seed."""
        evaluation = Evaluation(
            accelerator=Accelerator(cpu=True),
            policy=policy,
            reference=SecondModel(self.policy, torch.device("cpu"), offload=False),
            sampler=self.sampler(policy),
            rewards=self.rewards,
            prompts=self.prompts,
            packing=PACKING,
            responses_per_prompt=EVAL_RESPONSES,
            seed=seed,
            rival=self.rival(seed),
        )
        return {name: float(f"{value:.4g}") for name, value in evaluation().items()}


def play(inputs: Inputs, seed: int, kl_coef: float, arm: str, runs: Path) -> dict[str, Any]:
    """Trains and evaluates one cell; returns its line. Models are not kept."""
    own = runs / f"{seed}-{kl_coef:g}-{arm.replace(', ', '-').replace(' ', '_')}"
    shutil.rmtree(own, ignore_errors=True)
    runs.mkdir(parents=True, exist_ok=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    began = time.process_time()
    with (runs / f"{own.name}.txt").open("w") as log, redirect_stdout(log), redirect_stderr(log):
        train(inputs, seed, kl_coef, arm, own)
        trained = time.process_time()
        evaluated = inputs.evaluate(load_policy(str(own / "model")).eval(), seed)
    steps = [json.loads(line) for line in (own / METRICS).read_text().splitlines()]
    for kept in ("model", "adapter", "state"):
        shutil.rmtree(own / kept, ignore_errors=True)
    gc.collect()
    return {
        "seed": seed,
        "kl_coef": kl_coef,
        "arm": arm,
        "learning_rate": float(f"{steps[-1]['learning_rate']:.4g}"),
        "train_seconds": round(trained - began),
        "seconds": round(time.process_time() - began),
        "end": evaluated,
    }


def train(inputs: Inputs, seed: int, kl_coef: float, arm: str, output: Path) -> None:
    objective, own = ARMS[arm]
    common: dict[str, Any] = {"model": inputs.start, "output_dir": str(output), "seed": seed}
    if arm == OFFLINE:
        settings = SHARED | {"epochs": 1, "batch_size": PAIRS_PER_STEP, "max_response_tokens": 96}
        settings |= {"limit": UPDATES * 2 * PAIRS_PER_STEP, "beta": BETAS_PER_KL_COEF * kl_coef}
        preferences.train(
            DPOConfig(train_data=str(inputs.data / "reward.jsonl"), **common, **settings)
        )
        return
    reward: str | InMemory = inputs.reward_model
    if arm == COMPARED:
        reward = InMemory("comparisons", Preferred(inputs.rewards["reward"]))
    factor = BETAS_PER_KL_COEF if objective == "online_dpo" else 1.0
    settings = ONLINE | {"kl_coef": factor * kl_coef} | own
    settings["stop_strings"] = json.dumps(inputs.task.stops)
    loop.train(
        OBJECTIVES[objective](
            prompts=str(inputs.data / "sft.jsonl"), reward=reward, **common, **settings
        )
    )


def start_line(inputs: Inputs, seed: int) -> dict[str, Any]:
    """Where all arms of a seed begin."""
    return {"seed": seed, "kl_coef": 0.0, "arm": START, "end": inputs.evaluate(inputs.policy, seed)}


def record_of(task: str) -> Path:
    return RESULTS / f"{task}.jsonl"


def recorded(task: str) -> list[dict[str, Any]]:
    """The lines of a task's record."""
    return lines_of(record_of(task))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, default="human_preferences")
    parser.add_argument(
        "--inputs", type=Path, help="Folder of the task's script. Default: runs/TASK."
    )
    parser.add_argument("--runs", type=Path, help="Folder of logs. Default: runs/TASK_frontier.")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument(
        "--kl_coefs", type=float, nargs="+", default=list(KL_COEFS), help="Weights of the KL."
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    inputs = Inputs(TASKS[asked.task], asked.inputs or Path("runs") / asked.task)
    runs = asked.runs or Path("runs") / f"{asked.task}_frontier"
    # All arms of a seed before the next one: a record that is cut off is still balanced.
    for kl_coef, seed, arm in product(asked.kl_coefs, asked.seeds, (START, *asked.arms)):
        cell = (seed, 0.0 if arm == START else kl_coef, arm)
        if cell not in {
            (line["seed"], line["kl_coef"], line["arm"]) for line in recorded(asked.task)
        }:
            line = (
                start_line(inputs, seed) if arm == START else play(inputs, seed, kl_coef, arm, runs)
            )
            add_line(record_of(asked.task), line)


if __name__ == "__main__":
    main()
