"""The committed models of MANY_LANGUAGES: on every machine runs begin with the same weights and the same rewards.

python -m benchmarks.frontier.tasks.starts      trains those that are missing, in about two minutes each
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from benchmarks.frontier.tasks import synthetic
from benchmarks.frontier.tasks.groups import MANY_LANGUAGES, TASKS
from benchmarks.frontier.tasks.task import fine_tune, given_start, learn_preferences, reward_statistics, start_of
from fastp3o.models.loading import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frontier.tasks.starts", description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/frontier"), help="Folder of data and training.")
    folder = parser.parse_args().runs
    torch.set_num_threads(1)
    for number, name in enumerate(TASKS[MANY_LANGUAGES]):
        if not (start_of(number) / "rewards.json").exists():
            make_start(number, folder / name)


def make_start(number: int, folder: Path) -> None:
    """Trains the policy and the reward model of a language in `folder`, and keeps both in bf16."""
    synthetic.make_data(folder, number)
    policy = fine_tune(folder, folder, number, **synthetic.LIMITS)
    reward_model = learn_preferences(folder, folder, policy, number, **synthetic.LIMITS)
    start = start_of(number)
    keep(AutoModelForCausalLM.from_pretrained(policy), policy, start / "policy")
    keep(AutoModelForSequenceClassification.from_pretrained(reward_model), policy, start / "reward_model")
    statistics = reward_statistics(given_start(folder, number))
    (start / "rewards.json").write_text(json.dumps(statistics, indent=2) + "\n")


def keep(model: PreTrainedModel, policy: str, folder: Path) -> None:
    """Writes a model in bf16, which halves what is committed, with the policy's tokenizer."""
    model.to(torch.bfloat16).save_pretrained(folder)
    load_tokenizer(policy).save_pretrained(folder)


if __name__ == "__main__":
    main()
