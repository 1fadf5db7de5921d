"""Weights over NCCL, which sockets stand in for, by stand-ins of vLLM's classes; with -m vllm by vLLM's own."""

import os
import runpy
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from fastp3o.config import TrainableConfig
from fastp3o.endpoint import EndpointError
from fastp3o.errors import UserError
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.save import hub_weights, write_model
from fastp3o.models.trainable import add_lora
from fastp3o.rollouts.vllm import nccl_transfer
from fastp3o.rollouts.vllm.nccl_transfer import own_address
from fastp3o.training.loop import train
from tests.fastp3o.rollouts.vllm.stand_in import StandIn, served_by
from tests.fastp3o.rollouts.vllm.stand_in_nccl import NCCLStandIn, Wire, install
from tests.fastp3o.runs import assert_equal, config, metrics, weights
from tests.fastp3o.together import together
from tests.fastp3o.training.test_distributed import FP32, ONLINE

RUNS = Path(__file__).parents[2] / "training" / "runs_of_a_process.py"
UPDATE = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
INTERRUPTED = {"rounds_ahead": 2, "interrupt_rollouts": True}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 48}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
}
LATENT |= {"first_k_dense_replace": 1, "topk_group": 1, "num_experts_per_tok": 2}


@pytest.fixture(params=["0.32.0", "0.33.0", pytest.param("", marks=[pytest.mark.vllm, pytest.mark.timeout(600)])])
def version(request, monkeypatch):
    """Of vLLM, whose classes or stand-ins are imported; its own for the real one."""
    monkeypatch.setattr(nccl_transfer, "DEVICE", "cpu")
    if request.param:
        install(request.param, partial(monkeypatch.setitem, sys.modules))
        return request.param
    if "FASTP3O_VLLM" not in os.environ:
        pytest.skip("needs FASTP3O_VLLM, a Python that has vLLM: bash scripts/test_vllm.sh")
    paths = subprocess.check_output([os.environ["FASTP3O_VLLM"], "-c", r"print(*__import__('sys').path, sep='\n')"])
    monkeypatch.setattr(sys, "path", [*sys.path, *paths.decode().splitlines()])
    import vllm
    from vllm.distributed.weight_transfer import nccl_engine
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    def join(address, port, rank, size, device):
        assert rank == 0
        return Wire(address, port, size)

    monkeypatch.setattr(nccl_common, "stateless_init_process_group", join)
    streams = [SimpleNamespace(synchronize=lambda: None)] * 2
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda *_: streams)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    # What the workers check.
    checks = (nccl_engine.NCCLWeightTransferInitInfo, nccl_engine.NCCLWeightTransferUpdateInfo)
    monkeypatch.setattr(NCCLStandIn, "checks", checks)
    return vllm.__version__


@pytest.mark.parametrize(
    ("family", "lora_rank"),
    [(family, rank) for family in ("llama", "gpt_neox", "mixtral", "qwen2_moe", "deepseek_v3") for rank in (0, 2)],
)
def test_names_and_values_are_those_of_the_folder(tmp_path, family, lora_rank):
    """Of weights that are fused or renamed in memory, too."""
    extra = EXPERTS | LATENT | {"num_key_value_heads": 2, "shared_expert_intermediate_size": 16}
    model = PackedModel(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | extra)))
    if lora_rank:
        add_lora(model, TrainableConfig(lora_rank=lora_rank, lora_targets="all-linear"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    write_model(Accelerator(cpu=True), model, SimpleNamespace(save_pretrained=print), tmp_path, torch.bfloat16)
    written = load_file(tmp_path / "model.safetensors")
    layers = list(hub_weights(model.model, torch.bfloat16))
    sent = {name: weight for layer in layers for name, weight in layer.items()}
    assert len(sent) == sum(map(len, layers))
    assert len(layers) == 5  # embeddings, two layers, norm, head
    assert sent.keys() == written.keys()
    for name, weight in sent.items():
        assert weight.dtype == (torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16), name
        assert torch.equal(weight, written[name].to(weight.dtype)), name


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_run_is_that_with_a_folder(workplace, tiny_model, version, lora_rank):
    changes = {"updates": 3, "lora_rank": lora_rank, "learning_rate": 1e-2}
    for name in ("folder", "nccl"):
        with (
            NCCLStandIn(tiny_model, version=version, gpus=2) as first,
            NCCLStandIn(tiny_model, version=version) as last,
        ):
            train(config(tiny_model, name, **served_by(first, last), vllm_weights=name, **changes))
    assert metrics("folder") == metrics("nccl")
    assert_equal(weights("folder"), weights("nccl"))
    joined = ["/shutdown_weight_transfer_engine", "/init_weight_transfer_engine"]
    for server in (first, last):
        assert [path for path in server.paths() if path != "/v1/completions"] == joined + UPDATE * 3


@pytest.mark.parametrize("version", ["0.33.0"], indirect=True)
def test_a_server_that_was_started_anew_is_in_a_new_group(workplace, tiny_model, version):
    """The first one is lost in the second update, and away until the fourth."""
    with NCCLStandIn(tiny_model, version=version) as first, NCCLStandIn(tiny_model, version=version) as last:

        def complete(body):
            if first.completions == 2 + 4 + 1:
                first.completions, first.away, first.wires = first.completions + 1, 1, ()
            if first.away:
                raise ConnectionError
            return StandIn.complete(first, body)

        first.complete = complete
        changes = {"vllm_weights": "nccl", "updates": 4, "learning_rate": 1e-2}
        train(config(tiny_model, "run", **served_by(first, last), **changes))
    sizes = [
        [body["init_info"]["world_size"] for path, body in server.requests if "init_w" in path]
        for server in (first, last)
    ]
    assert sizes == [[3, 3], [3, 2, 3]]


@pytest.mark.parametrize("version", ["0.32.0"], indirect=True)
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"refuses": "/init_weight_transfer_engine"}, "init_weight.* status 404.*needs --weight-transfer-config"),
        ({"refuses": "/update_weights"}, "update_weights answered with status 404"),
        ({"stops": "/update_weights"}, "update_weights does not answer"),
        ({"hangs": "/update_weights"}, r"did not take the weights within 2 s \(--vllm_time_limit\)"),
    ],
)
def test_a_server_that_fails_ends_the_wait_for_all(workplace, tiny_model, version, fault, says):
    """The other one has no end of the weights, as vLLM's engine has none."""
    with NCCLStandIn(tiny_model, version=version) as first, NCCLStandIn(tiny_model, version=version, **fault) as last:
        limit = {"vllm_time_limit": 2.0 if "hangs" in fault else 60.0}
        begun = time.monotonic()
        with pytest.raises(EndpointError, match=f"{says}.*must be started anew"):
            train(config(tiny_model, "run", **served_by(first, last) | limit, vllm_weights="nccl"))
        assert time.monotonic() - begun < 20.0


def test_what_does_not_fit_is_refused(workplace, tiny_model, monkeypatch):
    def refused(says, **about):
        with NCCLStandIn(tiny_model, **about) as server, pytest.raises(UserError, match=says):
            train(config(tiny_model, "run", **served_by(server), vllm_weights="nccl"))

    refused("needs GPUs on both sides")
    monkeypatch.setattr(nccl_transfer, "DEVICE", "cpu")
    monkeypatch.setitem(sys.modules, "vllm", None)
    refused("needs vllm in this environment, too")
    for own, theirs in (("0.32.0", "0.33.0"), ("0.34.0", "0.34.1")):
        install(own, partial(monkeypatch.setitem, sys.modules))
        refused(f"0.32, or 0.33, on both sides, got {own[:4]} here and {theirs[:4]} at http", version=theirs)


def test_the_address_is_that_of_the_interface_towards_a_server(monkeypatch):
    assert own_address("http://localhost:8000") == "127.0.0.1"
    monkeypatch.setattr(socket, "gethostbyname", lambda *_: "127.0.1.1")
    # A net for documentation: nothing is sent.
    assert not own_address("http://192.0.2.1").startswith("127.")


def test_processes_send_together_what_is_spread_over_them(workplace, tiny_model):
    """Responses under way go on from new weights, which the probe compares with the policy's."""
    with NCCLStandIn(tiny_model, version="0.33.0", gpus=2) as server:
        settings = served_by(server) | INTERRUPTED | {"vllm_weights": "nccl", "model": tiny_model, "output_dir": "run"}
        flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        done = together(Path(__file__), "+", "p3o.py", *ONLINE, *FP32, *flags, "--updates", "4")
    assert done.returncode == 0, done.stdout
    update = ["/pause", *UPDATE, "/resume"]
    assert [path for path in server.paths() if path in update] == update * 2


if __name__ == "__main__":
    install("0.33.0")
    runpy.run_path(str(RUNS), run_name="__main__")
