"""A user of the stages reads the run's own lines, and no other libraries' unless something is wrong."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastp3o.models.loading import load_reward_model
from fastp3o.stages import reward_model, sft
from fastp3o.stages.reward_model import RewardModelConfig
from fastp3o.stages.sft import SFTConfig
from fastp3o.training.reporting import prompt_end, with_deviations


@pytest.fixture
def transformers_log() -> Iterator[list[str]]:
    """The records of transformers' logger of loading, which does not propagate to the one that pytest reads."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.addFilter(lambda record: messages.append(record.getMessage()))
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def test_stages_print_their_own_lines_alone(workplace: Path, tiny_model: str, capfd):
    common = {"report_to": "none", "batch_size": 4, "max_prompt_tokens": 32, "max_response_tokens": 16}
    sft.train(
        SFTConfig(model=tiny_model, train_data="sft.jsonl", eval_data="sft.jsonl", output_dir="runs/sft", **common)
    )
    data = {"train_data": "preferences.jsonl", "eval_data": "preferences.jsonl"}
    reward_model.train(RewardModelConfig(model="runs/sft/model", output_dir="runs/rm", **data, **common))
    out, err = capfd.readouterr()
    assert err == ""
    assert [line.split(":")[0] for line in out.splitlines()] == [
        *("sft.jsonl", "sft.jsonl", "after step 0", "after step 2"),
        *("preferences.jsonl", "preferences.jsonl", "after step 0", "after step 2"),
    ]


def test_the_missing_head_of_a_new_reward_model_goes_without_saying(tiny_model: str, transformers_log: list[str]):
    load_reward_model(tiny_model, new_head=True)
    assert transformers_log == []


def test_deviations_stand_beside_their_means():
    metrics = {"reward": 1.29612, "reward_std": 0.6681, "kl": 2.5, "kl_std": 1.0, "missing_eos": 0.05, "lone_std": 3.0}
    assert with_deviations(metrics) == "reward 1.296 ± 0.6681, kl 2.5 ± 1, missing_eos 0.05, lone_std 3"


def test_the_end_of_a_prompt_is_one_line():
    assert prompt_end("one\n\ntwo  three\n") == "one two three"
    assert prompt_end("one\n\ntwo  three\n", characters=7) == "…o three"
