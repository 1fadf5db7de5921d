"""New weights for vLLM servers over NCCL, from GPU to GPU, by vLLM's own engine for it.

Written against vLLM 0.32 and never run, since that takes GPUs on both sides. The servers are started with
`--weight-transfer-config '{"backend": "nccl"}'`, and fastp3o's environment has vllm, too.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from fastp3o.endpoint import EndpointError
from fastp3o.errors import UserError
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.trainable import each_whole_weight, named_weights
from fastp3o.rollouts.vllm.servers import Servers, reader


class Weights:
    """What vLLM calls a weight source: the policy's weights by name, whole, on its device and in one dtype.

    All processes iterate, since a sharded weight is gathered by all.
    """

    def __init__(self, policy: PackedModel, dtype: torch.dtype, described: type):
        """described: vLLM's record of a name, a dtype and a shape."""
        self.policy, self.dtype, self.described = policy, dtype, described

    def metadata(self) -> list[Any]:
        """Descriptions of all weights, in their order, without gathering one."""
        return [
            self.described(names[0], self.dtype, tuple(part.shape))
            for names, part, _ in named_weights(self.policy.model)
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        device = self.policy.model.device
        for names, weight in each_whole_weight(self.policy.model, self.dtype):
            yield names[0], weight.to(device, self.dtype)


class NCCLTransfer:
    """Sends the policy's weights to all servers. All processes call it, and the first one sends.

    Raises ValueError without vllm or a GPU, and EndpointError if a server does not join.
    """

    def __init__(self, accelerator: Accelerator, policy: PackedModel, dtype: torch.dtype, servers: Servers):
        if accelerator.device.type != "cuda":
            raise UserError("--vllm_transfer nccl needs GPUs on both sides: leave it at folder")
        try:
            from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
            from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
            from vllm.distributed.weight_transfer.nccl_engine import (
                NCCLTrainerInitInfo,
                NCCLTrainerWeightTransferEngine,
            )
        except ImportError as error:
            raise UserError(f"--vllm_transfer nccl needs vllm in this environment, too: {error}") from error
        source = type("PolicyWeights", (Weights, WeightSource), {})(policy, dtype, ParamMeta)
        self.engines = []
        for url in servers.urls:
            joined = NCCLTrainerInitInfo(
                rank=accelerator.process_index,
                master_address=socket.gethostbyname(socket.gethostname()),
                master_port=free_port(),
                world_size=1 + servers.endpoint(url, "/get_world_size").get(read_world_size),
            )
            client = HTTPVLLMWeightSyncClient(url, timeout=servers.time_limit)
            with endpoint_errors(url):
                self.engines.append(NCCLTrainerWeightTransferEngine.trainer_init(joined, client=client, source=source))
        self.urls = servers.urls

    def __call__(self) -> None:
        """Raises EndpointError if a server does not take the weights."""
        for url, engine in zip(self.urls, self.engines, strict=True):
            with endpoint_errors(url):
                engine.send_weights()


@contextmanager
def endpoint_errors(url: str) -> Iterator[None]:
    """Raises what vLLM's engine and its client raise as an EndpointError, so that the run's state is saved."""
    try:
        yield
    except Exception as error:
        raise EndpointError(f"{url} has not taken the weights over NCCL: {type(error).__name__}: {error}") from error


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


read_world_size = reader(
    lambda content: int(content["world_size"]), "which does not say how many GPUs the server has (world_size)"
)
