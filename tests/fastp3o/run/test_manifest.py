from dataclasses import fields

import pytest

from fastp3o.objectives.p3o import P3OConfig
from fastp3o.objectives.ppo import PPOConfig
from fastp3o.objectives.preferences import OFFLINE_OBJECTIVES, OnlineDPOConfig
from fastp3o.run.manifest import Manifest, ResumeError, require_same_run
from fastp3o.training.reward_model import RewardModelConfig
from fastp3o.training.sft import SFTConfig

BEFORE = {"model": "m", "output_dir": "o", "prompts": "p", "reward": "r:f"}
HASHES = {"model": "1", "prompts": "2", "reward function": "3"}


def resume(*, before=BEFORE, hashes=HASHES, processes=1, **changes) -> list[str]:
    manifest = Manifest(4, True, 1, P3OConfig(**before).plain(), HASHES, {})
    return require_same_run(manifest, P3OConfig(**(before | {"resume": True} | changes)), hashes, processes)


CONFIGS = [P3OConfig, PPOConfig, OnlineDPOConfig, SFTConfig, RewardModelConfig, *OFFLINE_OBJECTIVES.values()]
FIXED = {"model", "seed", "batch_size", "prompts_per_update", "lora_rank", "clipping", "reference", "eval_prompts"}


@pytest.mark.parametrize("config", CONFIGS)
def test_what_may_change_is_an_option(config):
    assert config.changeable() <= {field.name for field in fields(config)}
    assert not config.changeable() & (FIXED | {"objective"})


def test_what_takes_effect_is_said_in_one_line_each():
    assert resume(output_dir="moved", prompts="moved with the same contents") == []
    assert resume(learning_rate=0.5, kl_coef=0.1, hashes=HASHES | {"reward function": "9"}, processes=2) == [
        "resuming with another kl_coef: 0.05 before, 0.1 now",
        "resuming with another learning_rate: 1e-06 before, 0.5 now",
        "resuming with another source of the reward function",
        "resuming on another number of processes: 1 before, 2 now",
    ]


@pytest.mark.parametrize("changes", [{"seed": 1}, {"prompts_per_update": 128, "prompts_per_minibatch": 8}])
def test_what_would_be_another_run_is_refused_by_name(changes):
    with pytest.raises(ResumeError, match=r"--resume: this would be another run: .*or a new --output_dir") as refused:
        resume(**changes)
    assert all(f"--{name}" in str(refused.value) for name in changes)


def test_a_reference_that_is_a_mean_keeps_its_precision():
    changed = ["resuming with another precision: fp32 before, fp16 now"]
    assert resume(before=BEFORE | {"precision": "fp32"}, precision="fp16") == changed
    with pytest.raises(ResumeError, match=r"--precision \(fp32 before, fp16 now\)\. Give what was before"):
        resume(before=BEFORE | {"precision": "fp32", "reference_decay": 0.9}, precision="fp16")


def test_other_contents_under_the_same_name_are_refused_by_name():
    with pytest.raises(ResumeError, match=r"the content another .*: --prompts \(p\)\."):
        resume(hashes=HASHES | {"prompts": "9"})
    with pytest.raises(ResumeError, match=r"--model \(m\), --prompts \(p\)"):
        resume(hashes=HASHES | {"prompts": "9", "model": "8"})
