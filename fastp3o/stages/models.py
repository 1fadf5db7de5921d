"""Policy, reference and rewards, as the configuration of the online loop or of another stage names them."""

from functools import partial

from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from fastp3o.models.loading import load_policy
from fastp3o.models.moving_reference import MovingReference
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.reference import Reference, SecondModel, WithoutAdapters
from fastp3o.models.sharding import loading_device
from fastp3o.models.trainable import choose_trainable
from fastp3o.models.whole_copy import WholeCopy
from fastp3o.objectives.config import OnlineConfig
from fastp3o.objectives.offline.config import PreferenceConfig
from fastp3o.precision import Precision
from fastp3o.rewards.remote import RemoteReward
from fastp3o.rewards.reward import Reward, load_reward
from fastp3o.rewards.reward_model import ModelReward
from fastp3o.rollouts.room import available_memory
from fastp3o.stages.generate.config import GenerateConfig
from fastp3o.stages.samplers import SampledModel
from fastp3o.training.processes import on_main_process

# Bytes for each parameter: masters and moments of what trains, reference and reward model.
WHILE_TRAINING = 16


def whole_copy(
    policy: PackedModel,
    accelerator: Accelerator,
    precision: Precision,
    mesh: DeviceMesh,
    bytes_per_parameter: int = WHILE_TRAINING,
) -> WholeCopy:
    """What a sharded policy samples from: whole, where every process has the memory.

    bytes_per_parameter: of all that is spread over the processes.
    """
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    parts = bytes_per_parameter * parameters // mesh.size(-1)
    fits = parts + parameters * precision.weights.itemsize < available_memory(accelerator.device)
    by_layer = not all(gather_object([fits]))
    if by_layer:
        accelerator.print("a whole policy does not fit each process: rollouts gather one layer after the other")
    return WholeCopy(policy, accelerator.device, precision.weights, by_layer=by_layer)


def load_trainable_policy(config: OnlineConfig) -> PackedModel:
    model = load_policy(config.model, trust_remote_code=config.trust_remote_code, trains=True).train()
    model.check_reach(config.longest_sequence)
    choose_trainable(model, config)
    if config.gradient_checkpointing:
        model.recompute_activations()
    return model


def load_named_reward(
    config: OnlineConfig | PreferenceConfig | GenerateConfig,
    accelerator: Accelerator,
    precision: Precision,
    tokenizer: PreTrainedTokenizerBase,
    mesh: DeviceMesh | None,
    name: str,
    examples: Dataset,
) -> Reward:
    """examples: of which an endpoint is asked for a first one, before anything begins."""
    reward = load_reward(
        name,
        tokenizer,
        device=accelerator.device,
        dtype=precision.weights,
        packing=config.packing,
        mesh=mesh,
        offload=config.offload,
        trust_remote_code=config.trust_remote_code,
        remote=config,
    )
    if isinstance(reward, RemoteReward):
        on_main_process(accelerator, partial(reward.check, examples[:1]))
    # In another vocabulary, lengths are known with the texts.
    if isinstance(reward, ModelReward) and reward.shares_vocabulary:
        reward.model.model.check_reach(config.longest_sequence)
    return reward


def load_reference(
    config: OnlineConfig,
    accelerator: Accelerator,
    precision: Precision,
    policy: PackedModel,
    mesh: DeviceMesh | None,
) -> tuple[Reference, SampledModel | None]:
    """The loop's reference, which may move, and what is sampled of it where a mixture with it is."""
    if not config.from_mixture and not config.reference_moves:
        return load_fixed_reference(config, accelerator, precision, policy, mesh), None
    frozen = load_frozen_policy(config, accelerator, precision, mesh)
    sampled = None
    if config.from_mixture:
        sampled = SampledModel(frozen, None if mesh is None else whole_copy(frozen, accelerator, precision, mesh))
    second = SecondModel(frozen, accelerator.device, mesh, offload=config.offload)
    if config.reference_moves:
        return MovingReference(second, every=config.reference_every, decay=config.reference_decay), sampled
    return second, sampled


def load_fixed_reference(
    config: OnlineConfig | PreferenceConfig,
    accelerator: Accelerator,
    precision: Precision,
    policy: PackedModel,
    mesh: DeviceMesh | None,
) -> Reference:
    """What stays as it was when training began: a second model, or a LoRA policy without its adapters."""
    if config.lora_rank and not config.reference:
        return WithoutAdapters(policy)
    frozen = load_frozen_policy(config, accelerator, precision, mesh)
    return SecondModel(frozen, accelerator.device, mesh, offload=config.offload)


def load_frozen_policy(
    config: OnlineConfig | PreferenceConfig, accelerator: Accelerator, precision: Precision, mesh: DeviceMesh | None
) -> PackedModel:
    """What the policy's KL is measured against, before it is spread over the processes."""
    frozen = load_policy(
        config.reference or config.model,
        device=loading_device(accelerator.device, mesh),
        dtype=precision.weights,
        trust_remote_code=config.trust_remote_code,
    )
    frozen.check_reach(config.longest_sequence)
    return frozen
