"""The first minute on a GPU: a rollout with CUDA graphs, a tiny whole run of each stage."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.shapes import TRIAL
from fastp3o.models.packed_model import PackedModel
from fastp3o.objectives.preferences import OFFLINE_OBJECTIVES
from fastp3o.training import loop as online
from fastp3o.training import preferences as preference
from fastp3o.training import reward_model, sft
from fastp3o_kernels.decoding import response_keys
from tests.fastp3o import runs
from tests.fastp3o.models.model_families import random_model
from tests.fastp3o.rollouts.test_engine import PROMPTS, K, largest_difference, make_engine
from tests.fastp3o.training.test_supervised import reward_config, sft_config

pytestmark = pytest.mark.gpu
FEW = {"limit": 2, "prompts_per_update": 2, "prompts_per_minibatch": 2, "inner_epochs": 1, "max_response_tokens": 4}
# Each stage in its default precision.
SHORT = {"precision": "auto", "epochs": 2, "learning_rate": 1e-3}


def test_rollout_with_a_graph(device):
    policy = PackedModel(random_model("llama")).to(device)
    engine = make_engine(policy, graph=True)
    for _ in range(2):
        ids, logprobs = engine.run(PROMPTS, response_keys(3, torch.arange(len(PROMPTS)), K))
        assert largest_difference(policy, ids, logprobs) < 1e-4
    assert engine.graph.graph is not None


@pytest.mark.usefixtures("workplace")
def test_supervised_stages(tiny_model):
    data = {"train_data": "preferences.jsonl", "batch_size": 4, "report_to": "none", "max_response_tokens": 16}
    sft.train(sft_config(tiny_model, "sft", **SHORT))
    reward_model.train(reward_config(tiny_model, "reward", **SHORT))
    preference.train(OFFLINE_OBJECTIVES["dpo"](model=tiny_model, output_dir="dpo", **data, **SHORT))
    for folder in ("sft", "reward", "dpo"):
        assert_finite(folder)


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("K", [2, 4])
def test_p3o(tiny_model, K):
    fewer = FEW if TRIAL else {}
    config = runs.config(tiny_model, "run", updates=2, responses_per_prompt=K, precision="auto", **fewer)
    online.train(config)
    assert_finite("run")
    assert runs.metrics("run")[0]["kl"] >= 0


def assert_finite(folder: str) -> None:
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    assert lines
    # A skipped step of fp16 has a gradient that is not finite.
    assert all(math.isfinite(line[name]) for line in lines for name in ("loss", "reward", "kl") if name in line)
    assert (Path(folder) / "model").is_dir()
