"""What the online loop works with, built from its configuration."""

from functools import partial
from typing import NamedTuple

from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from fastp3o.data import load_prompts
from fastp3o.evaluation.evaluate import Evaluation
from fastp3o.models.loading import load_policy, load_tokenizer, require_same_vocabulary
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.reference import Reference, SecondModel, WithoutAdapters
from fastp3o.models.sharding import loading_device, process_mesh
from fastp3o.models.trainable import choose_trainable
from fastp3o.models.whole_copy import WholeCopy
from fastp3o.objectives.base import Objective
from fastp3o.objectives.config import OnlineConfig
from fastp3o.objectives.offline.config import PreferenceConfig
from fastp3o.precision import Precision, precision_of
from fastp3o.rewards.reward import Reward, load_reward
from fastp3o.rewards.reward_model import ModelReward
from fastp3o.rollouts.gathered_sampler import GatheredSampler
from fastp3o.rollouts.named_sampler import named_sampler
from fastp3o.rollouts.room import available_memory
from fastp3o.rollouts.sampler import Sampler
from fastp3o.stages.setup import check_divisible, load_data, make_accelerator
from fastp3o.training.optimizer import Optimizer
from fastp3o.training.order import examples_of_step, process_share
from fastp3o.training.run import Run
from fastp3o.training.run_folder import check_output_dir


class PromptsOfUpdate:
    """The prompts of an update that fall to this process: their texts, token ids, and numbers in the update."""

    def __init__(self, accelerator: Accelerator, examples: Dataset, config: OnlineConfig):
        self.accelerator, self.examples = accelerator, examples
        self.prompts_per_update, self.seed = config.prompts_per_update, config.seed

    def __call__(self, update: int) -> tuple[list[str], list[list[int]], list[int]]:
        chosen = examples_of_step(
            update - 1, batch_size=self.prompts_per_update, total=len(self.examples), seed=self.seed
        )
        examples = self.examples[process_share(chosen, self.accelerator)]
        numbers = process_share(list(range(self.prompts_per_update)), self.accelerator)
        return examples["prompt"], examples["prompt_ids"], numbers


class Online(NamedTuple):
    """The parts of the loop, in the order in which an update uses them."""

    accelerator: Accelerator
    prompts: PromptsOfUpdate
    sampler: Sampler
    reward: Reward
    objective: Objective
    policy: PackedModel
    reference: Reference
    optimizer: Optimizer
    run: Run


def set_up(config: OnlineConfig, reward: Reward | None, gold: Reward | None) -> Online:
    """Loads data and models, restores the state of a run that is resumed, and checks what can be checked before."""
    precision = precision_of(config.precision, automatic="fp16")
    accelerator = make_accelerator(config, precision)
    check_divisible(accelerator, config.prompts_per_update, "prompts_per_update")
    check_output_dir(accelerator, config)

    idle = accelerator.num_processes - config.prompts_per_minibatch
    if idle > 0:
        accelerator.print(
            f"--prompts_per_minibatch is {config.prompts_per_minibatch}, so {idle} of {accelerator.num_processes} "
            "processes have nothing to train on in each step: a multiple of their number uses them all"
        )
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    if config.reference:
        require_same_vocabulary(config.reference, config.model, tokenizer, trust_remote_code=config.trust_remote_code)
    examples, eval_examples = load_data(
        accelerator, load_prompts, config.prompts, config.eval_prompts, tokenizer, config
    )
    objective = config.objective()
    mesh = process_mesh(accelerator.device, config.shard_size)
    policy = load_trainable_policy(config)
    copy = None if mesh is None else whole_copy(policy, accelerator, precision, mesh)
    objective.add_to(policy)
    reward = reward or load_named_reward(config.reward, config, accelerator, precision, tokenizer, mesh)
    if gold is None and config.gold_reward:
        gold = load_named_reward(config.gold_reward, config, accelerator, precision, tokenizer, mesh)

    steps = config.updates * config.inner_epochs * config.minibatches_per_update
    optimizer = Optimizer(accelerator, policy, precision, config, steps, objective.learning_rates, mesh)
    reference = load_reference(config, accelerator, precision, policy, mesh)

    sampler = partial(policy_sampler, config, policy, copy, tokenizer)
    evaluation = None
    if eval_examples is not None:
        evaluation = Evaluation(
            accelerator,
            policy,
            reference,
            sampler(config.eval_batch_size),
            {"reward": reward} if gold is None else {"reward": reward, "gold": gold},
            eval_examples,
            config.packing,
            config.eval_responses_per_prompt,
            config.seed,
        )
    run = Run(
        accelerator,
        config,
        optimizer,
        tokenizer,
        stage=type(objective).__name__,
        step_name="update",
        steps=config.updates,
        evaluate=evaluation,
        data={"prompts": examples, "eval_prompts": eval_examples},
        parts={"reward_scaling": objective.scaler},
    )
    return Online(
        accelerator,
        PromptsOfUpdate(accelerator, examples, config),
        sampler(config.rollout_batch_size),
        reward,
        objective,
        policy,
        reference,
        optimizer,
        run,
    )


def policy_sampler(
    config: OnlineConfig | PreferenceConfig,
    policy: PackedModel,
    copy: WholeCopy | None,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
) -> Sampler:
    """copy: what a policy that is spread over processes samples from."""
    own = named_sampler(
        config.sampler,
        policy if copy is None else copy.model,
        tokenizer,
        max_response_tokens=config.max_response_tokens,
        batch_size=batch_size,
        memory_gb=config.rollout_memory,
        compiles=config.compile_rollouts,
        graph=False if copy is not None and copy.by_layer else None,
    )
    return own if copy is None else GatheredSampler(own, policy, copy)


def whole_copy(policy: PackedModel, accelerator: Accelerator, precision: Precision, mesh: DeviceMesh) -> WholeCopy:
    """What a sharded policy samples from: whole, where every process has the memory."""
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    # Masters and moments of what trains, reference and reward model.
    parts = 16 * parameters // mesh.size(-1)
    fits = parts + parameters * precision.weights.itemsize < available_memory(accelerator.device)
    by_layer = not all(gather_object([fits]))
    if by_layer:
        accelerator.print("a whole policy does not fit each process: rollouts gather one layer after the other")
    return WholeCopy(policy, accelerator.device, precision.weights, by_layer=by_layer)


def load_trainable_policy(config: OnlineConfig) -> PackedModel:
    model = load_policy(config.model, trust_remote_code=config.trust_remote_code).train()
    model.check_reach(config.longest_sequence)
    choose_trainable(model, config)
    if config.gradient_checkpointing:
        model.recompute_activations()
    return model


def load_named_reward(
    name: str,
    config: OnlineConfig | PreferenceConfig,
    accelerator: Accelerator,
    precision: Precision,
    tokenizer: PreTrainedTokenizerBase,
    mesh: DeviceMesh | None,
) -> Reward:
    reward = load_reward(
        name,
        tokenizer,
        device=accelerator.device,
        dtype=precision.weights,
        packing=config.packing,
        mesh=mesh,
        offload=config.offload,
        trust_remote_code=config.trust_remote_code,
    )
    # In another vocabulary, lengths are known with the texts.
    if isinstance(reward, ModelReward) and reward.shares_vocabulary:
        reward.model.model.check_reach(config.longest_sequence)
    return reward


def load_reference(
    config: OnlineConfig | PreferenceConfig,
    accelerator: Accelerator,
    precision: Precision,
    policy: PackedModel,
    mesh: DeviceMesh | None,
) -> Reference:
    if config.lora_rank and not config.reference:
        return WithoutAdapters(policy)
    frozen = load_policy(
        config.reference or config.model,
        device=loading_device(accelerator.device, mesh),
        dtype=precision.weights,
        trust_remote_code=config.trust_remote_code,
    )
    frozen.check_reach(config.longest_sequence)
    return SecondModel(frozen, accelerator.device, mesh, offload=config.offload)
