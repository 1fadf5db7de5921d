"""Stand-ins for vLLM's weight transfer of 0.32 and 0.33: what the trainer imports, and a server; sockets are NCCL."""

import math
import shutil
import socket
import sys
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from fastp3o.rollouts.vllm import nccl_transfer
from tests.fastp3o.rollouts.vllm.stand_in import StandIn

PACKAGE = "vllm.distributed.weight_transfer"


def install(version: str, set_module=sys.modules.__setitem__) -> None:
    """Has the trainer import the stand-ins of a version, and send from a CPU."""
    modules = [ModuleType(name) for name in ("vllm", "vllm.distributed", PACKAGE, f"{PACKAGE}.nccl_engine")]
    source = Source33 if version == "0.33.0" else Source32
    modules[0].__version__, modules[0].distributed, modules[1].weight_transfer = version, *modules[1:3]
    vars(modules[2]).update(ParamMeta=ParamMeta, WeightSource=source)
    vars(modules[3]).update(NCCLTrainerInitInfo=InitInfo, NCCLTrainerWeightTransferEngine=Trainer)
    for module in modules:
        set_module(module.__name__, module)
    nccl_transfer.DEVICE = "cpu"


class ParamMeta(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Source32(ABC):
    @abstractmethod
    def metadata(self): ...

    @abstractmethod
    def __iter__(self): ...


class Source33(ABC):
    def __init_subclass__(cls):
        assert isinstance(vars(cls)["metadata"], cached_property)

    def iter_full(self): ...


class InitInfo(SimpleNamespace):
    def __init__(self, master_address, master_port, world_size, *, rank):
        super().__init__(master_address=master_address, master_port=master_port, world_size=world_size)
        assert rank == 0


class Wire:
    """Rank 0 of the group. The others connect, and say who they are."""

    def __init__(self, address: str, port: int, size: int):
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((address, port))
            listening.listen()
            listening.settimeout(5.0)
            self.peers = [listening.accept()[0] for _ in range(size - 1)]
        assert sorted(peer.recv(1)[0] for peer in self.peers) == [*range(1, size)]

    def broadcast(self, tensor: torch.Tensor, src: int, stream=None) -> None:
        for peer in self.peers:
            peer.sendall(tensor.reshape(-1).view(torch.uint8).numpy())

    def destroy(self) -> None:
        for peer in self.peers:
            peer.close()


class Trainer:
    @classmethod
    def trainer_init(cls, init_info, *, client, source):
        engine = cls()
        engine.client, engine.source, engine.known = client, source, None
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(client.init_weight_transfer_engine, vars(init_info) | {"rank_offset": 1})
            engine.group = Wire(init_info.master_address, init_info.master_port, init_info.world_size)
            joined.result()
        return engine

    def send_weights(self) -> None:
        newer = isinstance(self.source, Source33)
        metadata = self.source.metadata if newer else self.source.metadata()
        told = [] if newer and metadata == self.known else metadata
        info = {"names": [name for name, *_ in told], "shapes": [[*shape] for *_, shape in told]}
        info["dtype_names"] = [str(dtype).removeprefix("torch.") for _, dtype, _ in told]
        self.client.start_weight_update()
        received = ThreadPoolExecutor(1).submit(self.client.update_weights, info)
        weights = self.source.iter_full() if newer else self.source
        for (name, weight), declared in zip(weights, metadata, strict=True):
            assert (name, weight.dtype, tuple(weight.shape)) == declared
            self.group.broadcast(weight, src=0)
        received.result()
        self.client.finish_weight_update()
        self.known = metadata

    def shutdown(self) -> None:
        self.group.destroy()


class NCCLStandIn(StandIn):
    """gpus: that it joins with; all must receive the same. refuses, stops, hangs: paths that have no good answer.
    checks: vLLM's classes of what its workers are told, or none.
    """

    refuses, stops, hangs, wires, checks = "", "", "", (), (dict, dict)

    def transfer(self, path: str, body: dict) -> dict | None:
        """The answer to a request of the transfer; None for one that is refused."""
        if path == self.refuses:
            return None
        if path == self.stops:
            raise ConnectionError
        if path == self.hangs:
            time.sleep(5.0)
        if path == "/init_weight_transfer_engine":
            joined = body["init_info"]
            self.checks[0](**joined)
            address = joined["master_address"], joined["master_port"]
            self.wires = [socket.create_connection(address) for _ in range(self.gpus)]
            for rank, wire in enumerate(self.wires, joined["rank_offset"]):
                wire.sendall(bytes([rank]))
        elif path == "/update_weights":
            self.checks[1](**body["update_info"])
            self.info = body["update_info"] if body["update_info"]["names"] else self.info
            dtypes = [getattr(torch, name) for name in self.info["dtype_names"]]
            sizes = [math.prod(shape) * d.itemsize for shape, d in zip(self.info["shapes"], dtypes, strict=True)]
            first, *others = [wire.makefile("rb").read(sum(sizes)) for wire in self.wires]
            assert [first] * len(others) == others
            parts = torch.frombuffer(bytearray(first), dtype=torch.uint8).split(sizes)
            described = zip(self.info["names"], parts, dtypes, self.info["shapes"], strict=True)
            self.received = {name: part.clone().view(dtype).view(shape) for name, part, dtype, shape in described}
        elif path == "/finish_weight_update":
            folder = f"received-{self.server_port}"
            shutil.copytree(self.folder, folder, dirs_exist_ok=True)
            save_file(self.received, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            self.load(folder)
        return {}
