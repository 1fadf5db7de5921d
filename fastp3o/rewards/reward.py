"""What every reward is, and how one is loaded by name."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from fastp3o.models.loading import load_reward_model, load_tokenizer
from fastp3o.models.sharding import loading_device
from fastp3o.packing.pack import Packing
from fastp3o.rewards.config import RemoteConfig
from fastp3o.rewards.function import FunctionReward
from fastp3o.rewards.names import is_endpoint, is_function
from fastp3o.rewards.remote import RemoteReward
from fastp3o.rewards.reward_model import ModelReward
from fastp3o.rollouts.rollouts import Rollouts

# Rollouts of P prompts with K responses each -> [P, K] fp32.
Reward = Callable[[Rollouts], Tensor]


def load_reward(
    name: str,
    policy_tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    dtype: torch.dtype,
    packing: Packing,
    mesh: DeviceMesh | None = None,
    offload: bool = False,
    trust_remote_code: bool = False,
    remote: RemoteConfig | None = None,
) -> Reward:
    """`module:function` is a Python function, http(s)://... an endpoint; anything else a reward model's folder or hub
    name.

    mesh: of processes over which a model is spread; None for one. remote: what goes to an endpoint, and how.
    """
    if is_endpoint(name):
        return RemoteReward(name, remote or RemoteConfig())
    if is_function(name):
        return FunctionReward(name)
    return ModelReward(
        load_reward_model(name, device=loading_device(device, mesh), dtype=dtype, trust_remote_code=trust_remote_code),
        load_tokenizer(name, trust_remote_code=trust_remote_code),
        policy_tokenizer,
        device=device,
        packing=packing,
        mesh=mesh,
        offload=offload,
    )


def columns_of(names: Iterable[str], config: RemoteConfig) -> dict[str, str]:
    """The columns of the prompts' data that rewards of these names ask for, each with what does, for messages."""
    return dict.fromkeys(config.columns, "--reward_columns") | {
        column: f"the reward function {name}"
        for name in names
        if is_function(name)
        for column in FunctionReward(name).columns
    }
