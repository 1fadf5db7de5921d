"""Algorithms under raters who go in circles, a line of circles.jsonl for each language and degree
that it lacks.

python -m benchmarks.frontier.runs.circles
"""

import argparse
import json
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM

from benchmarks.frontier.runs.records import add_line, lines_of
from benchmarks.frontier.tasks import circles
from benchmarks.frontier.tasks.task import RESULTS
from fastp3o.data.loading import load_prompts
from fastp3o.models.loading import load_policy
from fastp3o.models.tokenizer import load_tokenizer
from fastp3o.objectives.config.online import OBJECTIVES
from fastp3o.rollouts.groups import make_prompts, texts
from fastp3o.rollouts.transformers_sampler import TransformersSampler
from fastp3o.run.names import EVALUATIONS
from fastp3o.training import loop, reward_model
from fastp3o.training.config import RewardModelConfig

RECORD = RESULTS / "circles.jsonl"
SEEDS, DEGREES = range(8), (1.0, 0.5, 0.0)
# The tries for the reward model of each kind, (size of its vectors, learning rate); the one with
# the lowest held-out loss is the reward. A utility and a circle are two blocks, but not every start
# finds both with two.
MODELS = {"scores": [(0, 2e-3)], "comparisons": [(4, 5e-4), (8, 5e-4)]}
# Arm -> the kind of reward, the objective, its settings. Rates of P3O, PPO and GRPO were tuned on
# other tasks of the language; those of the others were not tuned.
SLOW = "comparisons, P3O by means, slow reference"
MEANS = {"pair_weights": "means"}
ARMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "scores, P3O": ("scores", "p3o", {"learning_rate": 6e-4}),
    "scores, PPO": ("scores", "ppo", {"learning_rate": 3e-4, "critic_learning_rate": 2e-3}),
    "scores, GRPO": ("scores", "grpo", {"learning_rate": 3e-4}),
    "comparisons, P3O by means": ("comparisons", "p3o", {"learning_rate": 6e-4, **MEANS}),
    "comparisons, P3O by pairs": (
        "comparisons",
        "p3o",
        {"learning_rate": 6e-4, "pair_weights": "comparisons"},
    ),
    "comparisons, Nash-MD": ("comparisons", "nash_md", {"learning_rate": 6e-4}),
    "comparisons, online IPO": ("comparisons", "online_ipo", {"learning_rate": 1e-4}),
    SLOW: ("comparisons", "p3o", {"learning_rate": 6e-4, "reference_decay": 0.9, **MEANS}),
}
# of P3O, PPO and GRPO, in deviations of the reward per nat; the others have their defaults
KL_COEF = 0.1
SETTINGS: dict[str, Any] = circles.LENGTHS | {
    "updates": 30,
    "responses_per_prompt": 4,
    "prompts_per_update": 32,
    "prompts_per_minibatch": 8,
    "inner_epochs": 2,
    "tokens_per_row": 2048,
    "eval_responses_per_prompt": 4,
    "eval_batch_size": 64,
    "precision": "fp32",
    "report_to": "none",
    "samples_every": 0,
    "log_rollouts": 0,
    "overwrite": True,
}
AVERAGED = ("scores, P3O", "comparisons, P3O by means", "comparisons, P3O by pairs")
SAVE_EVERY = 2  # updates, of arms whose weights are averaged over the second half
START, SAMPLED = "start", 32  # responses to each held-out prompt of each policy


def play(seed: int, degree: float, folder: Path) -> dict[str, Any]:
    """Trains all arms in `folder`; returns how good the reward models are, and the win rates of all
    policies.
    """
    start, own = folder / f"start-{seed}", folder / f"{seed}-{degree:g}"
    own.mkdir(parents=True, exist_ok=True)
    with (own / "log.txt").open("a") as log, redirect_stdout(log), redirect_stderr(log):
        if not (start / "policy").exists():
            circles.make_policy(start, seed)
        right = circles.make_pairs(own, start, seed, degree)
        models = {kind: learn(own, start, kind, seed) for kind in MODELS}
        ended = {arm: train_arm(arm, own, start, seed) for arm in ARMS}
        raters = circles.Raters(seed, degree)
        policies = {START: start / "policy"} | {arm: own / arm / "model" for arm in ARMS}
        policies |= {averaged_name(arm): average(own / arm) for arm in AVERAGED if arm in ARMS}
        features = {name: sampled(raters, policy, start) for name, policy in policies.items()}
    replies = np.concatenate([found[:, : SAMPLED // 2] for found in features.values()], axis=1)
    return {
        "seed": seed,
        "degree": degree,
        "raters_agree": round(right, 4),
        "reward_models": models,
        "ended": ended,
        "named": {
            name: round(float(found[..., 1:].any(axis=-1).mean()), 4)
            for name, found in features.items()
        },
        "largest_style": {
            name: round(circles.largest_style(found), 4) for name, found in features.items()
        },
        "win_rates": {
            name: {
                other: round(circles.win_rate(raters, found, rival), 4)
                for other, rival in features.items()
            }
            for name, found in features.items()
        },
        "worst_case": {
            name: round(circles.worst_case(raters, found[:, SAMPLED // 2 :], replies), 4)
            for name, found in features.items()
        },
    }


def learn(folder: Path, start: Path, kind: str, seed: int) -> dict[str, float]:
    """Tries for a reward model or a preference model, of which the one with the lowest held-out
    loss becomes KIND/model; returns its held-out metrics and its settings.
    """
    tries = []
    for number, (size, rate) in enumerate(MODELS[kind]):
        AcceleratorState._reset_state(reset_partial_state=True)
        output = folder / f"{kind}-{number}"
        config = RewardModelConfig(
            model=str(start / "policy"),
            output_dir=str(output),
            preference_dim=size,
            train_data=str(folder / "pairs.train.jsonl"),
            eval_data=str(folder / "pairs.eval.jsonl"),
            seed=seed,
            overwrite=True,
            **circles.REWARD_MODEL | {"learning_rate": rate},
        )
        reward_model.train(config)
        found = {
            name: last_evaluation(output)[name]
            for name in ("accuracy", "loss", "calibration_error")
        }
        tries.append((found | {"preference_dim": size, "learning_rate": rate}, output))
    best, output = min(tries, key=lambda one: one[0]["loss"])
    copytree(output, folder / kind, dirs_exist_ok=True)
    return best


def train_arm(arm: str, folder: Path, start: Path, seed: int) -> dict[str, float]:
    """Trains a policy; returns its KL to the start and, where there are scores, its reward."""
    AcceleratorState._reset_state(reset_partial_state=True)
    kind, objective, own = ARMS[arm]
    own = own | ({"kl_coef": KL_COEF} if objective in ("p3o", "ppo", "grpo") else {})
    own |= {"inner_epochs": 1} if objective == "nash_md" else {}  # its loss is on-policy
    own |= {"save_every": SAVE_EVERY} if arm in AVERAGED else {}
    config = OBJECTIVES[objective](
        model=str(start / "policy"),
        reward=str(folder / kind / "model"),
        output_dir=str(folder / arm),
        prompts=str(start / "prompts.train.jsonl"),
        eval_prompts=str(start / "prompts.eval.jsonl"),
        seed=seed,
        **SETTINGS | own,
    )
    loop.train(config)
    return {"kl": last_evaluation(folder / arm)["kl"]}


def averaged_name(arm: str) -> str:
    return f"{arm}, weights averaged"


def average(folder: Path) -> Path:
    """A model in averaged/, whose weights are the mean of a run's checkpoints in its second half."""
    first = SETTINGS["updates"] // 2
    saved = [
        path for path in sorted(folder.glob("checkpoint-*")) if int(path.name.split("-")[1]) > first
    ]
    models = [AutoModelForCausalLM.from_pretrained(path) for path in saved]
    mean = models[0]
    with torch.no_grad():
        for weights in zip(*(model.parameters() for model in models), strict=True):
            weights[0].copy_(torch.stack(weights).mean(0))
    mean.save_pretrained(folder / "averaged")
    load_tokenizer(str(folder / "model")).save_pretrained(folder / "averaged")
    return folder / "averaged"


def last_evaluation(folder: Path) -> dict[str, float]:
    """Rounded to four significant digits, finer than its error."""
    last = json.loads((folder / EVALUATIONS).read_text().splitlines()[-1])
    return {name: float(f"{value:.4g}") for name, value in last.items()}


def sampled(raters: circles.Raters, policy: Path, start: Path) -> np.ndarray:
    """The features of a policy's responses to the held-out prompts, [P, SAMPLED, 3]."""
    tokenizer = load_tokenizer(str(policy))
    examples, _ = load_prompts(str(start / "prompts.eval.jsonl"), tokenizer, max_prompt_tokens=16)
    longest = circles.LENGTHS["max_response_tokens"]
    sampler = TransformersSampler(
        load_policy(str(policy)), tokenizer, max_response_tokens=longest, batch_size=256
    )
    groups = sampler(make_prompts(examples[:]), SAMPLED, 0)
    return raters.features(*texts(groups)).reshape(len(groups), SAMPLED, -1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/circles"), help="Folder of starts, models and logs."
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="Languages.")
    parser.add_argument(
        "--degrees", type=float, nargs="+", default=list(DEGREES), help="Shares of circles."
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for seed, degree in product(asked.seeds, asked.degrees):
        if (seed, degree) not in {(line["seed"], line["degree"]) for line in lines_of(RECORD)}:
            line = play(seed, degree, asked.runs)
            add_line(RECORD, line)


if __name__ == "__main__":
    main()
