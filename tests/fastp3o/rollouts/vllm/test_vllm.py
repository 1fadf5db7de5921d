"""Runs with a real vLLM server, on a CPU: `bash scripts/test_vllm.sh`. A server takes a minute or
more to start.
"""

import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fastp3o.training.loop import train
from tests.fastp3o.runs import config, metrics

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
LONGEST_START = 900.0  # seconds
# A seeded request whose prompt is prefilled in parts kills the CPU's engine.
FLAGS = "--dtype float32 --max-model-len 1024 --max-num-seqs 64 --enforce-eager --no-enable-chunked-prefill"
FLAGS += " --max-num-batched-tokens 8192 --logprobs-mode processed_logprobs"
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
SETTINGS |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


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
    if "FASTP3O_VLLM" not in os.environ:
        pytest.skip("needs FASTP3O_VLLM, a Python that has vLLM: bash scripts/test_vllm.sh")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    python = os.environ["FASTP3O_VLLM"]
    command = (
        f"{python} -W ignore -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port {port}"
    )
    command += f" --model {model} {FLAGS}"
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "TRITON_INTERPRET")
    }
    environment |= SETTINGS | {"PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    with (tmp_path_factory.mktemp("server") / "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            command.split(), env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(health: str, process: subprocess.Popen) -> None:
    end = time.monotonic() + LONGEST_START
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(health).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(1.0)
    raise RuntimeError("the server has not started")


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
