"""The first minute on a GPU: a tiny whole run of each stage, in its default precision."""

import json
import math
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from benchmarks.shapes import TRIAL
from fastp3o.objectives.config.preferences import OFFLINE_OBJECTIVES
from fastp3o.training import loop as online
from fastp3o.training import preferences as preference
from fastp3o.training import reward_model, sft
from tests.fastp3o import runs
from tests.fastp3o.training.test_supervised import reward_config, sft_config

pytestmark = pytest.mark.gpu
FEW = {
    "limit": 2,
    "prompts_per_update": 2,
    "prompts_per_minibatch": 2,
    "inner_epochs": 1,
    "max_response_tokens": 4,
}
SHORT = {"precision": "auto", "epochs": 2, "learning_rate": 1e-3}


@pytest.mark.usefixtures("workplace")
def test_every_stage_stays_finite(tiny_model):
    data = {
        "train_data": "preferences.jsonl",
        "batch_size": 4,
        "report_to": "none",
        "max_response_tokens": 16,
    }
    sft.train(sft_config(tiny_model, "sft", **SHORT))
    reward_model.train(reward_config(tiny_model, "reward", **SHORT))
    preference.train(OFFLINE_OBJECTIVES["dpo"](model=tiny_model, output_dir="dpo", **data, **SHORT))
    fewer = FEW if TRIAL else {}
    AcceleratorState._reset_state()  # P3O's precision is another one
    online.train(
        runs.config(tiny_model, "p3o", updates=2, responses_per_prompt=4, precision="auto", **fewer)
    )
    for folder in ("sft", "reward", "dpo", "p3o"):
        lines = [
            json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()
        ]
        assert lines
        # A skipped step of fp16 has a gradient that is not finite.
        assert all(
            math.isfinite(line[name])
            for line in lines
            for name in ("loss", "reward", "kl")
            if name in line
        )
        assert (Path(folder) / "model").is_dir()
    assert lines[0]["kl"] >= 0
