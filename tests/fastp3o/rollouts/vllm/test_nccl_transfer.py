"""Weights over NCCL, which sockets stand in for, by stand-ins of vLLM's classes; with -m vllm by
vLLM's own.
"""

import math
import os
import runpy
import shutil
import socket
import subprocess
import sys
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fastp3o.calls.endpoint import EndpointError
from fastp3o.config import TrainableConfig
from fastp3o.errors import UserError
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.save import hub_weights, write_model
from fastp3o.models.trainable import add_lora
from fastp3o.rollouts.vllm import nccl_transfer
from fastp3o.training.loop import train
from tests.fastp3o.rollouts.vllm.stand_in import StandIn, served_by
from tests.fastp3o.runs import assert_equal, config, metrics, weights
from tests.fastp3o.together import together
from tests.fastp3o.training.test_distributed import FP32, ONLINE

RUNS = Path(__file__).parents[2] / "training" / "runs_of_a_process.py"
UPDATE = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 48,
}
SIZES |= {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
}
SIZES |= dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4)
SIZES |= dict.fromkeys(
    ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8
)
SIZES |= {"first_k_dense_replace": 1, "topk_group": 1, "num_experts_per_tok": 2}


def install(version: str, set_module=sys.modules.__setitem__) -> None:
    """Has the trainer import the stand-ins of a version."""
    package = "vllm.distributed.weight_transfer"
    source = type("WeightSource", (), {"iter_full": None} if version == "0.33.0" else {})
    meta = namedtuple("ParamMeta", "name dtype shape")
    init_info = namedtuple("NCCLTrainerInitInfo", "master_address master_port world_size rank")
    engine = {"NCCLTrainerInitInfo": init_info, "NCCLTrainerWeightTransferEngine": Trainer}
    contents = {
        "vllm": {"__version__": version},
        "vllm.distributed": {},
        f"{package}.nccl_engine": engine,
    }
    contents[package] = {"ParamMeta": meta, "WeightSource": source, "nccl_engine": None}
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        set_module(name, module)


class Wire:
    """Rank 0 of the group. The others connect, and say who they are."""

    def __init__(self, address: str, port: int, rank: int, size: int, device: object = None):
        assert rank == 0
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((address, port))
            listening.listen()
            listening.settimeout(5.0)
            self.peers = [listening.accept()[0] for _ in range(size - 1)]
        assert sorted(peer.recv(1)[0] for peer in self.peers) == [*range(1, size)]

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        for peer in self.peers:
            peer.sendall(tensor.reshape(-1).view(torch.uint8).numpy())

    def destroy(self) -> None:
        for peer in self.peers:
            peer.close()


class Trainer:
    @classmethod
    def trainer_init(cls, init_info, *, client, source):
        engine = cls()
        engine.client, engine.source, engine.told = client, source, None
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(
                client.init_weight_transfer_engine, init_info._asdict() | {"rank_offset": 1}
            )
            engine.group = Wire(*init_info[:2], init_info.rank, init_info.world_size)
            joined.result()
        return engine

    def send_weights(self) -> None:
        newer = hasattr(self.source, "iter_full")
        assert newer == isinstance(vars(type(self.source))["metadata"], cached_property)
        metadata = self.source.metadata if newer else self.source.metadata()
        # The newer one says only once what it sends.
        names, dtypes, shapes = (
            zip(*metadata, strict=True) if not newer or metadata != self.told else [()] * 3
        )
        info = {
            "names": names,
            "dtype_names": [str(dtype)[6:] for dtype in dtypes],
            "shapes": shapes,
        }
        self.client.start_weight_update()
        received = ThreadPoolExecutor(1).submit(self.client.update_weights, info)
        for declared, (name, weight) in zip(
            metadata, self.source.iter_full() if newer else self.source, strict=True
        ):
            assert declared == (name, weight.dtype, weight.shape)
            self.group.broadcast(weight, src=0)
        received.result()
        self.client.finish_weight_update()
        self.told = metadata

    def shutdown(self) -> None:
        self.group.destroy()


class NCCLStandIn(StandIn):
    """A server whose `gpus` must all receive the same. refuses, drops, hangs: a path that it
    answers so. checks: vLLM's classes of what its workers are told, or none.
    """

    refuses, drops, hangs, wires, checks = "", "", "", (), (dict, dict)

    def transfer(self, path: str, body: dict) -> dict | None:
        if path == self.drops:
            raise ConnectionError
        if path == self.hangs:
            time.sleep(4.0)
        if path == "/init_weight_transfer_engine" != self.refuses:
            info = body["init_info"]
            self.checks[0](**info)
            address = info["master_address"], info["master_port"]
            self.wires = [socket.create_connection(address) for _ in range(self.gpus)]
            for rank, wire in enumerate(self.wires, info["rank_offset"]):
                wire.sendall(bytes([rank]))
        if path == "/update_weights" != self.refuses:
            self.checks[1](**body["update_info"])
            if body["update_info"]["names"]:
                self.described = [
                    (*one,) for one in zip(*body["update_info"].values(), strict=True)
                ]
            described = [
                (name, getattr(torch, dtype), shape) for name, dtype, shape in self.described
            ]
            sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in described]
            first, *others = [wire.makefile("rb").read(sum(sizes)) for wire in self.wires]
            assert [first] * len(others) == others
            parts = torch.frombuffer(bytearray(first), dtype=torch.uint8).split(sizes)
            pairs = zip(described, parts, strict=True)
            self.received = {
                name: part.clone().view(dtype).view(shape) for (name, dtype, shape), part in pairs
            }
        if path == "/finish_weight_update":
            shutil.copytree(
                self.folder, received := f"received-{self.server_port}", dirs_exist_ok=True
            )
            save_file(self.received, f"{received}/model.safetensors", metadata={"format": "pt"})
            self.load(received)
        return None if path == self.refuses else {}


@pytest.fixture(
    params=[
        "0.32.0",
        "0.33.0",
        pytest.param("", marks=[pytest.mark.vllm, pytest.mark.timeout(600)]),
    ]
)
def version(request, monkeypatch):
    """Of vLLM, whose stand-ins are imported; without one vLLM itself is, and the network alone is
    replaced.
    """
    monkeypatch.setattr(nccl_transfer, "DEVICE", "cpu")
    if request.param:
        install(request.param, partial(monkeypatch.setitem, sys.modules))
        return request.param
    if "FASTP3O_VLLM" not in os.environ:
        pytest.skip("needs FASTP3O_VLLM, a Python that has vLLM: bash scripts/test_vllm.sh")
    paths = subprocess.check_output(
        [os.environ["FASTP3O_VLLM"], "-c", r"print(*__import__('sys').path, sep='\n')"]
    )
    monkeypatch.setattr(sys, "path", [*sys.path, *paths.decode().splitlines()])
    import vllm
    from vllm.distributed.weight_transfer import nccl_common, nccl_engine, packed_tensor

    monkeypatch.setattr(nccl_common, "stateless_init_process_group", Wire)
    streams = [SimpleNamespace(synchronize=lambda: None)] * 2
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda *_: streams)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    checks = (nccl_engine.NCCLWeightTransferInitInfo, nccl_engine.NCCLWeightTransferUpdateInfo)
    monkeypatch.setattr(NCCLStandIn, "checks", checks)
    return vllm.__version__


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "mixtral", "qwen2_moe", "deepseek_v3"])
def test_names_and_values_are_those_of_the_folder(tmp_path, family, lora_rank):
    """Of weights that are fused or renamed in memory, too."""
    model = PackedModel(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES)))
    if lora_rank:
        add_lora(model, TrainableConfig(lora_rank=lora_rank))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    write_model(
        Accelerator(cpu=True),
        model,
        SimpleNamespace(save_pretrained=print),
        tmp_path,
        torch.bfloat16,
    )
    written = load_file(tmp_path / "model.safetensors")
    layers = list(hub_weights(model.model, torch.bfloat16))
    assert len(layers) == 5  # embeddings, two layers, norm, head
    sent = {name: weight for layer in layers for name, weight in layer.items()}
    assert sent.keys() == written.keys()
    for name, weight in sent.items():
        assert weight.dtype == (
            torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        ), name
        assert torch.equal(weight, written[name].to(weight.dtype)), name


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_run_is_that_with_a_folder(workplace, tiny_model, version, lora_rank):
    changes, served = (
        {"updates": 3, "lora_rank": lora_rank, "learning_rate": 1e-2},
        {"version": version},
    )
    for way in ("folder", "nccl"):
        with (
            NCCLStandIn(tiny_model, gpus=2, **served) as first,
            NCCLStandIn(tiny_model, **served) as last,
        ):
            train(config(tiny_model, way, **served_by(first, last), vllm_weights=way, **changes))
    assert metrics("folder") == metrics("nccl")
    assert_equal(weights("folder"), weights("nccl"))
    joined = ["/shutdown_weight_transfer_engine", "/init_weight_transfer_engine"]
    for server in (first, last):
        assert [path for path in server.paths() if path != "/v1/completions"] == joined + UPDATE * 3


@pytest.mark.parametrize("version", ["0.33.0"], indirect=True)
@pytest.mark.parametrize(("away", "sizes"), [(0, ([3, 3], [3, 3])), (1, ([3, 3], [3, 2, 3]))])
def test_a_server_that_was_started_anew_is_in_a_new_group(
    workplace, tiny_model, version, away, sizes
):
    """The first one is lost in the second update, and back in the next or the one after it."""
    with (
        NCCLStandIn(tiny_model, version=version) as first,
        NCCLStandIn(tiny_model, version=version) as last,
    ):

        def complete(body):
            if first.completions == 2 + 4 + 1:
                first.completions, first.away, first.wires = first.completions + 1, away, ()
            if not first.wires:
                raise ConnectionError
            return StandIn.complete(first, body)

        first.complete = complete
        train(
            config(
                tiny_model, "run", **served_by(first, last), vllm_weights="nccl", learning_rate=1e-2
            )
        )
    for server, expected in zip((first, last), sizes, strict=True):
        infos = [
            body["init_info"]
            for path, body in server.requests
            if path == "/init_weight_transfer_engine"
        ]
        assert [info["world_size"] for info in infos] == expected
        # towards these servers, whatever this machine's name means
        assert infos[0]["master_address"] == "127.0.0.1"


@pytest.mark.parametrize("version", ["0.32.0"], indirect=True)
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            {"refuses": "/init_weight_transfer_engine"},
            "init_weight.* status 404.*needs --weight-transfer-config",
        ),
        ({"refuses": "/update_weights"}, "update_weights answered with status 404"),
        ({"drops": "/update_weights"}, "update_weights does not answer"),
        (
            {"hangs": "/update_weights"},
            r"did not take the weights within 2 s \(--vllm_time_limit\)",
        ),
    ],
)
def test_a_server_that_fails_ends_the_wait_for_all(workplace, tiny_model, version, fault, says):
    """The other one has no end of the weights, as vLLM's engine has none."""
    limit, begun = {"vllm_time_limit": 2.0 if "hangs" in fault else 60.0}, time.monotonic()
    with (
        NCCLStandIn(tiny_model, version=version) as first,
        NCCLStandIn(tiny_model, version=version, **fault) as last,
    ):
        with pytest.raises(EndpointError, match=f"{says}.*must be restarted"):
            train(config(tiny_model, "run", **served_by(first, last) | limit, vllm_weights="nccl"))
        assert time.monotonic() - begun < 30.0


def test_what_does_not_fit_is_refused(workplace, tiny_model, monkeypatch):
    def refused(says, **about):
        with NCCLStandIn(tiny_model, **about) as server, pytest.raises(UserError, match=says):
            train(config(tiny_model, "run", **served_by(server), vllm_weights="nccl"))

    refused("needs GPUs on both sides")
    monkeypatch.setattr(nccl_transfer, "DEVICE", "cpu")
    monkeypatch.setitem(sys.modules, "vllm", None)
    refused("needs vllm in this environment, too")
    for here, there in (("0.32.0", "0.33.0"), ("0.34.0", "0.34.1")):
        install(here, partial(monkeypatch.setitem, sys.modules))
        refused(
            f"0.32, or 0.33, on both sides, got {here[:4]} here, {there[:4]} there", version=there
        )


def test_processes_send_together_what_is_spread_over_them(workplace, tiny_model):
    """Responses under way go on from new weights, which the probe compares with the policy's."""
    with NCCLStandIn(tiny_model, version="0.33.0", gpus=2) as server:
        settings = served_by(server) | {
            "vllm_weights": "nccl",
            "model": tiny_model,
            "output_dir": "run",
            "updates": 4,
        }
        settings |= {"rounds_ahead": 2, "interrupt_rollouts": True}
        flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        done = together(Path(__file__), "+", "p3o", *ONLINE, *FP32, *flags)
    assert done.returncode == 0, done.stdout
    update = ["/pause", *UPDATE, "/resume"]
    assert [path for path in server.paths() if path in update] == update * 2


if __name__ == "__main__":
    install("0.33.0")
    nccl_transfer.DEVICE = "cpu"
    runpy.run_path(str(RUNS), run_name="__main__")
