"""What the online loop works with, built from its configuration."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor

from fastp3o.data import load_demonstrations, load_prompts
from fastp3o.evaluation.evaluate import Evaluation
from fastp3o.models.loading import load_tokenizer, require_same_vocabulary
from fastp3o.models.moving_reference import MovingReference
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.reference import Reference, SecondModel
from fastp3o.models.sharding import process_mesh
from fastp3o.objectives.base import Objective
from fastp3o.objectives.config import OnlineConfig
from fastp3o.objectives.mixture import MixtureConfig
from fastp3o.precision import precision_of
from fastp3o.rewards.reward import Reward, columns_of
from fastp3o.rewards.scoring import scores_of, weighted
from fastp3o.rollouts.rollouts import Rollouts
from fastp3o.rollouts.sampler import Sampler, sample
from fastp3o.stages.models import (
    load_frozen_policy,
    load_named_reward,
    load_reference,
    load_trainable_policy,
    whole_copy,
)
from fastp3o.stages.online.dynamic_sampling import DynamicSampling
from fastp3o.stages.samplers import SampledModel, policy_sampler, with_mixture
from fastp3o.stages.setup import check_divisible, load_data, load_examples, make_accelerator
from fastp3o.training.finite import require_finite
from fastp3o.training.minibatches import optimizer_step
from fastp3o.training.optimizer import Optimizer
from fastp3o.training.order import examples_of_step, process_share, seed_of
from fastp3o.training.pretraining_mix import PretrainingMix
from fastp3o.training.run import Run
from fastp3o.training.run_folder import check_output_dir

# Sets seeds of responses that are sampled again apart from those of the order of minibatches.
AGAIN = 2**32 - 3


class PromptsOfUpdate:
    """The prompts of an update that fall to this process: their examples, and their numbers in the update."""

    def __init__(self, accelerator: Accelerator, examples: Dataset, config: OnlineConfig):
        self.accelerator, self.examples = accelerator, examples
        self.prompts_per_update, self.seed = config.prompts_per_update, config.seed

    def __call__(self, update: int, numbers: list[int] | None = None) -> tuple[dict[str, list], list[int]]:
        """numbers: of other prompts of the update than this process's."""
        chosen = examples_of_step(
            update - 1, batch_size=self.prompts_per_update, total=len(self.examples), seed=self.seed
        )
        if numbers is None:
            numbers = process_share(list(range(self.prompts_per_update)), self.accelerator)
        return self.examples[[chosen[number] for number in numbers]], numbers


class Online(NamedTuple):
    """The parts of the loop, in the order in which an update uses them."""

    accelerator: Accelerator
    prompts: PromptsOfUpdate
    sampler: Sampler
    score: Callable[[Rollouts], dict[str, Tensor]]
    resample: DynamicSampling
    objective: Objective
    policy: PackedModel
    reference: Reference
    step: Callable[..., dict[str, Tensor]]  # optimizer_step
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
    asked = columns_of(config.rewards if reward is None else [], config)
    asked_of_eval = asked | columns_of([config.gold_reward] if gold is None and config.gold_reward else [], config)
    examples, eval_examples = load_data(
        accelerator,
        partial(load_prompts, columns=asked),
        config.prompts,
        config.eval_prompts,
        tokenizer,
        config,
        eval_loader=partial(load_prompts, columns=asked_of_eval),
    )
    objective = config.build()
    mesh = process_mesh(accelerator.device, config.shard_size)
    policy = load_trainable_policy(config)
    copy = None if mesh is None else whole_copy(policy, accelerator, precision, mesh)
    objective.add_to(policy)
    load = partial(load_named_reward, config, accelerator, precision, tokenizer, mesh)
    reward = reward or weighted({name: load(name, examples) for name in config.rewards}, config.weights)
    if gold is None and config.gold_reward:
        gold = load(config.gold_reward, eval_examples)

    steps = config.updates * config.inner_epochs * config.minibatches_per_update
    optimizer = Optimizer(accelerator, policy, precision, config, steps, objective.learning_rates, mesh)
    reference, sampled_reference = load_reference(config, accelerator, precision, policy, mesh)
    # Evaluations measure how far the policy has come from where the reference began.
    start = reference
    if config.reference_moves:
        frozen = load_frozen_policy(config, accelerator, precision, mesh)
        start = SecondModel(frozen, accelerator.device, mesh, offload=True)
    sampled = SampledModel(policy, copy)
    evaluation = None
    if eval_examples is not None:
        evaluation = Evaluation(
            accelerator,
            policy,
            start,
            policy_sampler(config, sampled, tokenizer, config.eval_batch_size),
            {"reward": reward} if gold is None else {"reward": reward, "gold": gold},
            eval_examples,
            config.packing,
            config.eval_responses_per_prompt,
            config.seed,
        )
    texts, pretraining = None, None
    if config.ptx_data:
        check_divisible(accelerator, config.ptx_batch_size, "ptx_batch_size")
        load_texts = partial(load_demonstrations, max_response_tokens=config.max_response_tokens)
        texts = load_examples(accelerator, load_texts, config.ptx_data, config.split, None, tokenizer, config)
        mix = config.ptx_coef, config.ptx_batch_size, config.packing, config.seed
        pretraining = PretrainingMix(optimizer, texts, *mix)
    run = Run(
        accelerator,
        config,
        optimizer,
        tokenizer,
        stage=type(objective).__name__,
        step_name="update",
        steps=config.updates,
        evaluate=evaluation,
        data={"prompts": examples, "eval_prompts": eval_examples, "ptx_data": texts},
        parts=objective.parts,
        tensors=reference.tensors if isinstance(reference, MovingReference) else dict,
    )
    prompts = PromptsOfUpdate(accelerator, examples, config)
    sampler = policy_sampler(config, sampled, tokenizer, config.rollout_batch_size)
    if isinstance(config, MixtureConfig) and sampled_reference is not None:
        sampler = with_mixture(sampler, config, sampled, sampled_reference, tokenizer)

    def sample_again(update: int, numbers: list[int], attempt: int) -> Rollouts:
        seed = seed_of(config.seed, update, AGAIN, attempt)
        return sample(sampler, *prompts(update, numbers), responses_per_prompt=config.responses_per_prompt, seed=seed)

    def score(rollouts: Rollouts) -> dict[str, Tensor]:
        scores = scores_of(accelerator, reward, rollouts, config, config.max_response_tokens)
        require_finite(accelerator, "a reward", scores["reward"])
        return scores

    return Online(
        accelerator,
        prompts,
        sampler,
        score,
        DynamicSampling(accelerator, sample_again, score, config.dynamic_sampling),
        objective,
        policy,
        reference,
        partial(optimizer_step, optimizer, beside=pretraining),
        run,
    )
