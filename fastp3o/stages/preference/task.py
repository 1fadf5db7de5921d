"""What learning from pairs and from single responses have in common: the reference, the loss, sampled evaluations."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from datasets import Dataset
from torch import Tensor, nn

from fastp3o.data import load_prompts
from fastp3o.evaluation.evaluate import Evaluation
from fastp3o.models.loading import load_policy, require_same_vocabulary
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.reference import LoadedForEachUse, Reference
from fastp3o.models.trainable import choose_trainable
from fastp3o.objectives.offline.config import PreferenceConfig
from fastp3o.packing.packed_row import PackedRow
from fastp3o.rewards.reward import Reward, columns_of
from fastp3o.rewards.scoring import weighted
from fastp3o.stages.models import load_fixed_reference, load_named_reward, whole_copy
from fastp3o.stages.samplers import SampledModel, policy_sampler
from fastp3o.stages.setup import Setting, load_examples
from fastp3o.stages.supervised import SupervisedTask
from fastp3o.training.order import Examples
from fastp3o.training.processes import on_main_process
from fastp3o.training.reference_logprobs import ReferenceLogprobs
from fastp3o.training.states.fingerprints import of_model
from fastp3o_kernels import Groups, Head, LinearLossOutput, linear_loss


@dataclass(frozen=True)
class PreferenceRow(PackedRow):
    """A packed row of P groups of K responses, and what its loss takes beside the policy."""

    of_responses: dict[str, Tensor]  # [P, K] each

    @classmethod
    def of(cls, row: PackedRow, of_batch: dict[str, Tensor]) -> "PreferenceRow":
        """of_batch: of all groups of a batch, which row.groups are numbers of."""
        numbers = list(row.groups)
        return cls(**vars(row), of_responses={name: values[numbers] for name, values in of_batch.items()})


class Preferences(SupervisedTask[PreferenceRow]):
    """Before the first step the reference's log-probs are computed, or found in their file; then it is gone.

    columns: of the responses whose log-probs they are; those of one tuple share their prompt in a row.
    """

    config: PreferenceConfig
    columns: tuple[tuple[str, ...], ...]

    def __init__(self, config: PreferenceConfig):
        self.config, self.name = config, config.objective
        self.reference: Reference | None = None

    def load_model(self) -> PackedModel:
        model = load_policy(self.config.model, trust_remote_code=self.config.trust_remote_code, trains=True)
        choose_trainable(model, self.config)
        return model

    def set_up(self, setting: Setting, data: dict[str, Dataset]) -> None:
        """Loads the reference, unless its log-probs of all data are found."""
        config, self.data = self.config, data
        if config.reference:
            require_same_vocabulary(
                config.reference, config.model, setting.tokenizer, trust_remote_code=config.trust_remote_code
            )
        accelerator, precision, _, policy, mesh = setting
        load = partial(load_fixed_reference, config, accelerator, precision, policy, mesh)
        if config.eval_prompts:
            self.samples = evaluation_of_samples(config, setting, config.eval_prompts, LoadedForEachUse(load))
        if config.needs_reference:
            weights = on_main_process(setting.accelerator, lambda: of_model(config.reference or config.model))
            self.ref_logprobs = ReferenceLogprobs(
                setting.accelerator,
                Path(config.reference_logprobs or config.output_dir),
                data,
                self.columns,
                config.packing,
                depends_on=(weights, setting.precision.name),
            )
            self.reference = None if self.ref_logprobs.complete else load()

    def complete(self, stop_or_save: Callable[[], None]) -> dict[str, Dataset]:
        """The data with log-probs of the reference, [n, 2], which is dropped."""
        if not self.config.needs_reference:
            return self.data
        if self.reference is not None:
            self.ref_logprobs.compute(self.reference, stop_or_save)
            self.reference = None
            # A model that is spread over processes refers to itself.
            gc.collect()
        return self.ref_logprobs.added_to_data()

    def losses(self, model: nn.Module, row: PreferenceRow) -> dict[str, Tensor]:
        def sums(groups: Groups) -> tuple[Tensor, dict[str, Tensor]]:
            return self.config.losses(groups).sum(), self.config.metrics(groups)

        def loss(hidden: Tensor, head: Head) -> LinearLossOutput:
            return linear_loss(
                hidden,
                head,
                row.labels,
                row.cu_seqlens_on_host,
                sums,
                responses_per_group=row.responses_per_prompt or 1,
                of_responses=row.of_responses,
                divisor=1,
            )

        output = model(row, row.scored_at, loss)
        return {"loss": output.loss, **output.metrics}

    def count(self, examples: Examples) -> int:
        """Pairs, or single responses."""
        return len(examples["prompt_ids"])


def evaluation_of_samples(config: PreferenceConfig, setting: Setting, prompts: str, reference: Reference) -> Evaluation:
    """Of responses sampled to prompts, as in the online loop; before the policy is spread over processes."""
    accelerator, precision, tokenizer, policy, mesh = setting
    split, limit = config.eval_split, config.eval_limit
    gold = [config.gold_reward] if config.gold_reward else []
    load_with_columns = partial(load_prompts, columns=columns_of([*config.rewards, *gold], config))
    examples = load_examples(accelerator, load_with_columns, prompts, split, limit, tokenizer, config)
    load = partial(load_named_reward, config, accelerator, precision, tokenizer, mesh)
    rewards: dict[str, Reward] = {}
    if config.rewards:
        rewards["reward"] = weighted({name: load(name, examples) for name in config.rewards}, config.weights)
    if config.gold_reward:
        rewards["gold"] = load(config.gold_reward, examples)
    copy = None if mesh is None else whole_copy(policy, accelerator, precision, mesh)
    sampler = policy_sampler(config, SampledModel(policy, copy), tokenizer, config.rollout_batch_size)
    return Evaluation(accelerator, policy, reference, sampler, rewards, examples, config.packing, 1, config.seed)
