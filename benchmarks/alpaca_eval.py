"""Reward models and preference models on AlpacaEval's comparisons: results/alpaca_eval.json.

    python scripts/make_alpaca_eval.py --clone CLONE --output_dir runs/alpaca_eval/data
    python -m benchmarks.alpaca_eval --model MODEL

A cell is a kind, its labels (soft or hard) and a seed. All train on the same comparisons, and judge
the same held-out ones, which have soft labels. What a cell says of these stays in its folder, so
that a run goes on where it stopped. Two rivals read no text: the longer answer, and the answer of
the language model that won more in training.
"""

import argparse
import gc
import json
import shutil
import time
from collections import defaultdict
from itertools import product
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState

from benchmarks.frozen_states import FrozenStates
from benchmarks.records import RESULTS
from fastp3o.data.loading import load_rankings
from fastp3o.evaluation.calibration import calibration_error
from fastp3o.evaluation.interval import half_width
from fastp3o.models.loading import load_reward_model
from fastp3o.models.tokenizer import load_tokenizer
from fastp3o.training import reward_model
from fastp3o.training.config import RewardModelConfig
from fastp3o.training.supervised import train_supervised

RECORD = RESULTS / "alpaca_eval.json"
SCORES, COMPARISONS = "scores", "comparisons"
KINDS = {SCORES: 0, COMPARISONS: 4}  # name -> --preference_dim
LABELS = {"soft": "train.jsonl", "hard": "train_hard.jsonl"}
READING: dict[str, Any] = {"max_prompt_tokens": 224, "max_response_tokens": 320}
SETTINGS: dict[str, Any] = READING | {
    "epochs": 1,
    "batch_size": 16,
    "trainable_layers": 1,
    "learning_rate": 1e-4,
    "precision": "fp32",
    "tokens_per_row": 1024,
    "report_to": "none",
    "save_minutes": 0.0,
    "overwrite": True,
}


Cell = tuple[str, str, int]  # kind, labels, seed
Said = dict[str, Any]  # log_odds of the held-out comparisons, and seconds of the processor


# --- training and judging -------------------------------------------------------------------------


def play(cell: Cell, model: str, data: Path, folder: Path, states: FrozenStates) -> None:
    """Trains one cell, and keeps what it says of the held-out comparisons: the log-odds of the
    chosen answers.
    """
    kind, labels, seed = cell
    AcceleratorState._reset_state(reset_partial_state=True)
    began = time.process_time()
    config = RewardModelConfig(
        model=model,
        train_data=str(data / LABELS[labels]),
        output_dir=str(folder),
        preference_dim=KINDS[kind],
        seed=seed,
        **SETTINGS,
    )
    task = task_of(config)
    load = task.load_model
    task.load_model = lambda *given, **options: states.used_by(load(*given, **options))
    train_supervised(task, None)
    trained = time.process_time()
    said: Said = {"log_odds": log_odds(config, data / "held_out.jsonl", states)}
    said |= {"train_seconds": trained - began, "seconds": time.process_time() - began}
    said_by(folder).write_text(json.dumps(said))
    for made in ("model", "adapter", "state"):
        shutil.rmtree(folder / made, ignore_errors=True)
    gc.collect()


def said_by(folder: Path) -> Path:
    return folder / "held_out.json"


def task_of(config: RewardModelConfig) -> reward_model.RewardModeling:
    """What `fastp3o reward` trains with this configuration."""
    kind = reward_model.PreferenceModeling if config.preference_dim else reward_model.RewardModeling
    return kind(config)


def frozen_states(model: str, data: Path, path: Path) -> FrozenStates:
    """Of all comparisons below the layers that train."""
    states = FrozenStates(path, SETTINGS["trainable_layers"])
    config = RewardModelConfig(model=model, train_data="", output_dir=str(path.parent), **SETTINGS)
    loaded = states.used_by(load_reward_model(model, new_head=True).eval())
    for name in ("train", "held_out"):
        examples, _ = load_rankings(str(data / f"{name}.jsonl"), load_tokenizer(model), **READING)
        states.compute(loaded, task_of(config).pack(examples[:]))
    return states


@torch.no_grad()
def log_odds(config: RewardModelConfig, held_out: Path, states: FrozenStates) -> list[float]:
    """log P(chosen) − log P(rejected) by the finished model, in the order of the file."""
    task, name = task_of(config), str(Path(config.output_dir) / "model")
    model = states.used_by(load_reward_model(name, vector_size=config.preference_dim).eval())
    examples, _ = load_rankings(str(held_out), load_tokenizer(name), **READING)
    found = np.full(len(examples), np.nan)
    for row in task.pack(examples[:]):
        outputs = task.outputs(model, row)
        found[row.group_of_pair.numpy()] = task.log_odds(outputs[row.better], outputs[row.worse])
    return found.tolist()


# --- what was said --------------------------------------------------------------------------------


class HeldOut:
    """The held-out comparisons, N of them. probability: the judge's, that the chosen answer is
    better, at least ½.
    """

    def __init__(self, records: list[dict[str, Any]]):
        self.records = records
        self.probability = np.array([one["probability"] for one in records])
        _, self.instruction = np.unique([one["prompt"] for one in records], return_inverse=True)
        self.longer = longer(records)
        self.hard = np.array([one["judge"] == "alpaca_eval_gpt4" for one in records])

    def right(self, log_odds: np.ndarray) -> np.ndarray:
        """The share of the judge's probability on the answer that is ahead, ½ for a tie: [N]."""
        return 0.5 + np.sign(log_odds) * (self.probability - 0.5)

    def interval(self, values: np.ndarray, of: np.ndarray | None = None) -> dict[str, float]:
        """The mean of values [N], of these comparisons, and half of its 95% interval. Comparisons
        of one instruction depend on each other: the interval is one over instructions.
        """
        kept = np.arange(len(values)) if of is None else np.flatnonzero(of)
        _, instructions = np.unique(self.instruction[kept], return_inverse=True)
        mean = values[kept].mean()
        errors = np.bincount(instructions, values[kept] - mean)
        half = half_width(errors / np.bincount(instructions).mean(), len(errors) - 1)
        return {"mean": rounded(mean), "half": rounded(half)}

    def accuracies(self, right: np.ndarray) -> dict[str, Any]:
        """Of all comparisons, and of parts of them."""
        parts = {
            "accuracy": None,
            "accuracy against text_davinci_003, hard labels": self.hard,
            "accuracy against gpt4_1106_preview, soft labels": ~self.hard,
            "accuracy where the longer answer was chosen": self.longer > 0,
            "accuracy where the shorter answer was chosen": self.longer < 0,
        }
        return {name: self.interval(right, of) for name, of in parts.items()}

    def log_loss(self, log_odds: np.ndarray) -> np.ndarray:
        """The cross entropy of the judge's probability and σ(log_odds), [N]."""
        return np.logaddexp(0, -log_odds) + (1 - self.probability) * log_odds


def longer(records: list[dict[str, Any]]) -> np.ndarray:
    """By how much the chosen answer is longer than the rejected one, in logarithms of characters."""
    return np.log([len(one["chosen"]) / len(one["rejected"]) for one in records])


def winner(records: list[dict[str, Any]], trained_on: list[dict[str, Any]]) -> np.ndarray:
    """By how much the language model of the chosen answer has won more of the comparisons to train
    on; 0 if one of the two is not in them.
    """
    won = defaultdict(list)
    for one in trained_on:
        won[one["chosen_model"]].append(one["probability"])
        won[one["rejected_model"]].append(1 - one["probability"])
    shares = {model: np.mean(shares) for model, shares in won.items()}
    names = [(one["chosen_model"], one["rejected_model"]) for one in records]
    return np.array(
        [shares[a] - shares[b] if a in shares and b in shares else 0.0 for a, b in names]
    )


def length_slope(lengths: np.ndarray, probability: np.ndarray) -> float:
    """The w of σ(w x longer) that fits these probabilities best, by Newton's method."""
    slope = 0.0
    for _ in range(50):
        predicted = 1 / (1 + np.exp(-slope * lengths))
        curvature = (predicted * (1 - predicted) * lengths**2).sum()
        slope += ((probability - predicted) * lengths).sum() / curvature
    return float(slope)


def rivals(held_out: HeldOut, trained_on: list[dict[str, Any]]) -> dict[str, Any]:
    won = winner(held_out.records, trained_on)
    labels = np.array([one["probability"] for one in trained_on])
    slope = length_slope(longer(trained_on), labels)
    by_length = slope * held_out.longer
    return {
        "the longer answer": {
            **held_out.accuracies(held_out.right(held_out.longer)),
            "log_loss": held_out.interval(held_out.log_loss(by_length)),
            "slope": rounded(slope),
        },
        "the model that won more": held_out.accuracies(held_out.right(won)),
        "the judge itself": held_out.accuracies(held_out.probability)
        | {"log_loss": held_out.interval(entropy(held_out.probability))},
    }


def entropy(probability: np.ndarray) -> np.ndarray:
    inside = np.clip(probability, 1e-12, 1 - 1e-12)
    return -(inside * np.log(inside) + (1 - inside) * np.log(1 - inside))


def described(held_out: HeldOut, seeds: dict[int, Said]) -> dict[str, Any]:
    """A kind with its labels: each comparison counts with its mean over seeds."""
    said = list(seeds.values())
    log_odds = [np.array(one["log_odds"]) for one in said]
    right = np.mean([held_out.right(one) for one in log_odds], 0)
    losses = np.mean([held_out.log_loss(one) for one in log_odds], 0)
    return {
        "seeds": list(seeds),
        **held_out.accuracies(right),
        "accuracy by seed": [rounded(held_out.right(one).mean()) for one in log_odds],
        "log_loss": held_out.interval(losses),
        "calibration_error": [
            rounded(calibration_error(one, held_out.right(one))) for one in log_odds
        ],
        "longer answer ahead": rounded(
            np.mean([np.sign(one) == np.sign(held_out.longer) for one in log_odds])
        ),
        "correlation with length": rounded(
            np.mean([np.corrcoef(one, held_out.longer)[0, 1] for one in log_odds])
        ),
        "processor_seconds": [round(one["seconds"]) for one in said],
    }


def paired(held_out: HeldOut, first: list[np.ndarray], second: list[np.ndarray]) -> dict[str, Any]:
    """Two judges of the same held-out comparisons: the difference of their accuracies and log
    losses, the first one's less the second one's, with its interval, and of each seed the
    comparisons about which only one of them is right, with the p of McNemar's exact test, which
    takes comparisons for independent.
    """
    rights = [np.mean([held_out.right(one) for one in judge], 0) for judge in (first, second)]
    losses = [np.mean([held_out.log_loss(one) for one in judge], 0) for judge in (first, second)]
    discordant = []
    for one, other in zip(first, second, strict=True):
        only = [int(((a > 0) & (b <= 0)).sum()) for a, b in ((one, other), (other, one))]
        discordant.append({"only one is right": only, "p": rounded(mcnemar(*only))})
    return {
        "accuracy": held_out.interval(rights[0] - rights[1]),
        "log_loss": held_out.interval(losses[0] - losses[1]),
        "by seed": discordant,
    }


def mcnemar(first: int, second: int) -> float:
    """The two-sided p of so uneven a split by a fair coin."""
    n, fewer = first + second, min(first, second)
    return min(1.0, 2 * sum(comb(n, k) for k in range(fewer + 1)) / 2**n)


def rounded(value: float) -> float:
    return float(f"{value:.3g}")


def record(data: Path, said: dict[Cell, Said]) -> dict[str, Any]:
    """said: what each cell said of the held-out comparisons."""
    held_out, trained_on = HeldOut(read(data / "held_out.jsonl")), read(data / "train.jsonl")
    models: dict[str, dict[int, Said]] = {}
    for (kind, labels, seed), one in said.items():
        models.setdefault(f"{kind}, {labels}", {})[seed] = one
    return {
        "what": "Gemma 3 270M dequantized from Q4_K_M, AlpacaEval's comparisons, on a CPU",
        "settings": SETTINGS,
        "preference_dim": KINDS[COMPARISONS],
        "train": counted(trained_on),
        "held_out": counted(held_out.records),
        "rivals": rivals(held_out, trained_on),
        "models": {name: described(held_out, seeds) for name, seeds in models.items()},
        "paired": compared(held_out, models),
    }


def compared(held_out: HeldOut, models: dict[str, dict[int, Said]]) -> dict[str, Any]:
    """Kinds and labels beside each other, on the seeds that both have, and each model beside the
    longer answer.
    """
    pairs = [(f"{SCORES}, {labels}", f"{COMPARISONS}, {labels}") for labels in LABELS]
    pairs += [(f"{kind}, soft", f"{kind}, hard") for kind in KINDS]
    found = {}
    for first, second in pairs:
        shared = sorted(models.get(first, {}).keys() & models.get(second, {}).keys())
        if shared:
            judges = [
                [np.array(models[name][seed]["log_odds"]) for seed in shared]
                for name in (first, second)
            ]
            found[f"{first} less {second}"] = {"seeds": shared, **paired(held_out, *judges)}
    for name, seeds in models.items():
        judge = [np.array(one["log_odds"]) for one in seeds.values()]
        beside = paired(held_out, judge, [held_out.longer] * len(judge))
        found[f"{name} less the longer answer"] = {"accuracy": beside["accuracy"]}
    return found


def counted(records: list[dict[str, Any]]) -> dict[str, Any]:
    sure = np.array([one["probability"] for one in records])
    return {
        "comparisons": len(records),
        "instructions": len({one["prompt"] for one in records}),
        "judges": {
            judge: sum(one["judge"] == judge for one in records)
            for judge in sorted({one["judge"] for one in records})
        },
        "probability below 0.9": rounded((sure < 0.9).mean()),
    }


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runs = Path("runs/alpaca_eval")
    parser.add_argument("--model", required=True, help="Causal LM or its folder.")
    parser.add_argument("--data", type=Path, default=runs / "data", help="Folder of the data.")
    parser.add_argument("--runs", type=Path, default=runs / "cells", help="Folder of the cells.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only_record", action="store_true", help="Of the cells there are.")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    said: dict[Cell, Said] = {}
    states = None
    asked.runs.mkdir(parents=True, exist_ok=True)
    # A study that is cut off has all seeds of soft labels first.
    for labels, seed, kind in product(LABELS, asked.seeds, KINDS):
        folder = asked.runs / f"{kind}-{labels}-{seed}"
        if not said_by(folder).exists() and not asked.only_record:
            states = states or frozen_states(asked.model, asked.data, asked.runs / "states.pt")
            play((kind, labels, seed), asked.model, asked.data, folder, states)
        if said_by(folder).exists():
            said[kind, labels, seed] = json.loads(said_by(folder).read_text())
    RECORD.write_text(json.dumps(record(asked.data, said), indent=1) + "\n")


if __name__ == "__main__":
    main()
