"""New weights for vLLM servers over NCCL, from GPU to GPU, by the trainer's side of vLLM's own
weight transfer.

Tested with vLLM's classes and without the network: it has not run on GPUs.
"""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from functools import cached_property, partial
from itertools import accumulate
from queue import Queue
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import httpx
import torch
from accelerate import Accelerator
from torch import Tensor

from fastp3o.calls.answers import Answers
from fastp3o.calls.endpoint import EndpointError
from fastp3o.errors import UserError
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.save import hub_weights
from fastp3o.rollouts.vllm.servers import QUICK, Servers, dotted, read_version
from fastp3o.runtime.processes import on_main_process

DEVICE = "cuda"  # that has NCCL
POLL = 0.01  # seconds


class NCCLTransfer:
    """Sends a policy's weights to all servers that are there. All processes call it: they gather a
    layer at a time, which the main one sends to all at once. It and the servers' GPUs are one
    group, made again when servers have come or gone.

    dtype: in which parameters are sent. Raises UserError without a GPU, and without the servers'
    version of vLLM here.
    """

    def __init__(
        self, accelerator: Accelerator, policy: PackedModel, dtype: torch.dtype, servers: Servers
    ):
        if accelerator.device.type != DEVICE:
            raise UserError("--vllm_weights nccl needs GPUs on both sides")
        self.accelerator, self.servers = accelerator, servers
        self.layers = partial(hub_weights, policy.model, dtype)
        self.described: list[tuple[str, torch.dtype, torch.Size]] = []
        self.gpus: dict[str, int] = {}  # of each server in the group
        self.engine: Any = None
        on_main_process(accelerator, lambda: require_same_vllm(servers))

    def __call__(self, *, restarted: bool) -> None:
        """restarted: whether a server has been started again. Raises EndpointError on all processes if
        one fails, or if not all is sent within the servers' time limit. The others may wait for the
        rest then, and be of no more use.
        """
        if not self.described:
            weights = (weight for layer in self.layers() for weight in layer.items())
            self.described = [(name, weight.dtype, weight.shape) for name, weight in weights]
        on_main_process(self.accelerator, lambda: self.begin(restarted))
        for layer in self.layers():
            on_main_process(self.accelerator, partial(self.send, layer))
        on_main_process(self.accelerator, lambda: self.send(None))

    def begin(self, restarted: bool) -> None:
        """Starts to send in a thread, which is abandoned if it hangs in NCCL."""
        # Who is gone is found now: a group would wait for it.
        answers = self.servers.post_to_all("/get_world_size", None, timeout=QUICK)
        gpus = {url: answers[url]["world_size"] for url in self.servers.present}
        self.queue: Queue[dict[str, Tensor] | None] = Queue()
        self.running: Future[None] = Future()
        self.deadline = time.monotonic() + self.servers.time_limit
        # Each thread has its own.
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1

        def run() -> None:
            try:
                with torch.cuda.device(device):
                    if restarted or gpus != self.gpus:
                        self.join(gpus)
                    self.engine.send_weights()
                    self.running.set_result(None)
            except Exception as error:
                self.fail(f"{type(error).__name__} in vLLM's transfer: {error}")

        Thread(target=run, daemon=True).start()

    def join(self, gpus: dict[str, int]) -> None:
        from vllm.distributed.weight_transfer import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        self.leave()
        self.gpus = gpus
        self.ask("shutdown_weight_transfer_engine")  # an older group
        metadata = [ParamMeta(*weight) for weight in self.described]
        members: dict[str, Any] = {
            "metadata": lambda _: metadata,
            "__iter__": lambda _: self.sent(),
        }
        if hasattr(WeightSource, "iter_full"):  # from 0.33 on
            members = {
                "metadata": cached_property(lambda _: metadata),
                "iter_full": lambda _: self.sent(),
            }
        client = SimpleNamespace(
            init_weight_transfer_engine=lambda info: self.ask(
                "init_weight_transfer_engine", init_info=info
            ),
            start_weight_update=lambda: self.ask("start_weight_update"),
            update_weights=lambda info: self.ask("update_weights", update_info=info),
            finish_weight_update=lambda: self.ask("finish_weight_update"),
        )
        # The first one that is not of this machine alone.
        address = min(map(own_address, gpus), key=lambda address: address.startswith("127."))
        with socket.socket() as held:
            # A socket that is bound and does not listen leaves its port to the next with this
            # option, and to no other.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((address, 0))
            info = NCCLTrainerInitInfo(
                address, held.getsockname()[1], 1 + sum(gpus.values()), rank=0
            )
            source = type("PolicyWeights", (WeightSource,), members)()
            self.engine = NCCLTrainerWeightTransferEngine.trainer_init(
                info, client=client, source=source
            )

    def leave(self) -> None:
        """Aborts the transfer in progress on the GPU."""
        if self.engine:
            self.engine.shutdown()
        self.engine, self.gpus = None, {}

    def send(self, layer: dict[str, Tensor] | None) -> None:
        """Queues a layer, and waits until at most one is left to send. None: waits until all are
        sent.
        """
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # vLLM copies on streams of its own
        self.queue.put(layer)
        while (layer is None or self.queue.qsize() > 1) and not wait(
            [self.running], timeout=POLL
        ).done:
            if time.monotonic() > self.deadline:
                late = f"{', '.join(self.gpus)} did not take the weights within {self.servers.time_limit:g} s"
                self.fail(f"{late} (--vllm_time_limit)")
        if self.running.done() and self.running.exception():
            self.leave()
            self.running.result()

    def fail(self, what: str) -> None:
        with suppress(InvalidStateError):  # it has ended before
            self.running.set_exception(EndpointError(f"{what}. The servers must be restarted"))

    def sent(self) -> Iterator[tuple[str, Tensor]]:
        """What vLLM's engine asks for."""
        while layer := self.queue.get():
            for name, weight in layer.items():
                if weight.is_cuda:
                    weight.record_stream(torch.cuda.current_stream())  # which copies it
                yield name, weight.to(self.accelerator.device)

    def ask(self, name: str, **body: dict[str, Any]) -> None:
        """Asks all servers of the group at once. If one refuses, vLLM's engine may wait for it for
        ever.
        """
        ranks = dict(zip(self.gpus, accumulate(self.gpus.values(), initial=1), strict=False))

        def post(url: str, stopped: Event) -> Any:
            own = (
                {"init_info": body["init_info"] | {"rank_offset": ranks[url]}}
                if "init_info" in body
                else body
            )
            return self.servers.endpoint(url, f"/{name}", retries=0, abandons=True).post(
                own, json.loads, stopped
            )

        try:
            list(Answers(post, self.gpus, len(self.gpus)))
        except EndpointError as error:
            self.fail(f'{error}. It needs --weight-transfer-config \'{{"backend": "nccl"}}\'')
            raise


def require_same_vllm(servers: Servers) -> None:
    try:
        from vllm import __version__
        from vllm.distributed.weight_transfer import nccl_engine  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--vllm_weights nccl needs vllm in this environment, too: {error}"
        ) from error
    versions = [read_version(json.dumps({"version": __version__}).encode())]
    versions += [
        servers.endpoint(url, "/version", timeout=QUICK).get(read_version) for url in servers.urls
    ]
    if set(versions) not in ({(0, 32)}, {(0, 33)}):
        here, *there = map(dotted, versions)
        both = f"{here} here, {', '.join(there)} there"
        raise UserError(f"--vllm_weights nccl needs vLLM 0.32, or 0.33, on both sides, got {both}")


def own_address(url: str) -> str:
    """This machine's address as seen from a server. Its host name may resolve to 127.0.1.1."""
    with socket.socket(type=socket.SOCK_DGRAM) as towards:
        towards.connect((httpx.URL(url).host, httpx.URL(url).port or 80))  # sends nothing
        return towards.getsockname()[0]
