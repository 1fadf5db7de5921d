"""Reward and sequence KL of a policy on a fixed set of prompts: one point of the paper's KL-reward
frontier.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor

from fastp3o.evaluation.interval import share_interval
from fastp3o.evaluation.length_controlled import NotDeterminedError, length_controlled
from fastp3o.evaluation.rival import Preferences, Rival, preferences
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.models.reference import Reference
from fastp3o.models.sharding import map_rows_in_lockstep, with_tensor_group
from fastp3o.packing.pack import Packing
from fastp3o.packing.seeds import derived_seed
from fastp3o.packing.shares import process_share
from fastp3o.packing.tables import sums_by_group
from fastp3o.rewards.reward import Reward, logged_means, rewarded
from fastp3o.rollouts.groups import Group, Sampler, finished, lengths, make_prompts, pack_groups

# Sets evaluation seeds apart from those of updates, which are counted from 0.
EVALUATION = 2**32 - 1


class PromptVerdicts(NamedTuple):
    """Comparisons with the rival's responses. won: points of each prompt, half a point for a tie,
    and judged: the prompt's comparisons with a verdict, [P]. preferred, longer: as `Preferences`
    has them, [P, K].
    """

    won: np.ndarray
    judged: np.ndarray
    preferred: np.ndarray
    longer: np.ndarray

    def of(self, places: range) -> "PromptVerdicts":
        """The verdicts of some prompts."""
        return PromptVerdicts(*(part[places.start : places.stop] for part in self))


def by_prompt(table: Preferences) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The parts of PromptVerdicts."""
    return table.preferred.nansum(dim=1), (~table.preferred.isnan()).sum(dim=1), *table


@dataclass(frozen=True)
class Evaluation:
    """Samples responses to every prompt, always with the same seed, and rewards them. rewards: keys
    are the names of their means. prompts: with the columns that rewards ask for. sets: places of
    prompts, whose own means are `set/NAME/...`. greedy: samples the most likely tokens, for
    `greedy/...`. rival: whose responses to this process's prompts the policy's are compared with;
    None if they are not.
    """

    accelerator: Accelerator
    policy: PackedModel
    reference: Reference | None
    sampler: Sampler
    rewards: dict[str, Reward]
    prompts: Dataset
    packing: Packing
    responses_per_prompt: int
    seed: int
    sets: Mapping[str, range] = field(default_factory=dict)
    greedy: Sampler | None = None
    rival: Rival | None = None

    def __call__(self) -> dict[str, float]:
        """Means over prompts of: rewards (no penalties), KL to the reference, if there is one, in
        nats per sequence (log π − log π_ref of the samples), response length in tokens, share
        without end-of-sequence. `_std` is the standard deviation over prompts. And means of what
        rewards log. Against a rival also win rates, with `_low` and `_high`, their 95% interval
        over prompts, and with `_length_controlled`, unless this is not determined, which is
        printed; missing verdicts count for nothing.
        """
        numbers = process_share(list(range(len(self.prompts))), self.accelerator)
        prompts = make_prompts(self.prompts[numbers], numbers)
        groups = self.sampler(
            prompts, self.responses_per_prompt, derived_seed(self.seed, EVALUATION)
        )
        with self.accelerator.autocast():
            with_deviation = rewarded(self.rewards, groups)
            if self.reference is not None:
                with_deviation["kl"] = self.sequence_log_ratios(groups, self.reference)
        wins = (
            {}
            if self.rival is None
            else preferences(self.rewards, with_deviation, groups, self.rival)
        )
        logged = logged_means(self.rewards)
        values = with_deviation | lengths_and_ends(groups)
        if self.greedy is not None:
            groups = self.greedy(prompts, 1, self.seed)
            with self.accelerator.autocast():
                likeliest = rewarded(self.rewards, groups) | lengths_and_ends(groups)
            values |= {f"greedy/{name}": value for name, value in likeliest.items()}
            if self.rival is not None:
                of_greedy = preferences(self.rewards, likeliest, groups, self.rival)
                wins |= {f"greedy/{name}": table for name, table in of_greedy.items()}
            logged |= {
                f"greedy/{name}": value for name, value in logged_means(self.rewards).items()
            }
        # Of all processes, in the order of the prompts.
        order = torch.tensor(gather_object(numbers)).argsort()
        means = {
            name: torch.tensor(gather_object(value.mean(dim=1).tolist()))[order]
            for name, value in values.items()
        }
        verdicts = {
            name: PromptVerdicts(
                *(
                    np.array(gather_object(part.tolist()))[order.numpy()]
                    for part in by_prompt(table)
                )
            )
            for name, table in wins.items()
        }
        return self.by_set(means, verdicts, with_deviation.keys()) | logged

    def by_set(
        self,
        means: Mapping[str, Tensor],
        verdicts: Mapping[str, PromptVerdicts],
        with_deviation: Collection[str],
    ) -> dict[str, float]:
        """Metrics over all prompts and over those of each set, from values of each prompt, [P].
        verdicts: of each win rate. with_deviation: names of the means that get one.
        """
        metrics: dict[str, float] = {}
        sets = {"": range(len(self.prompts))} | {
            f"set/{name}/": places for name, places in self.sets.items()
        }
        for prefix, places in sets.items():
            for name, prompt_means in means.items():
                chosen = prompt_means[places.start : places.stop]
                metrics[prefix + name] = chosen.mean().item()
                if name in with_deviation:
                    metrics[f"{prefix}{name}_std"] = chosen.std().item() if len(chosen) > 1 else 0.0
            metrics |= self.win_rates(
                {prefix + name: its.of(places) for name, its in verdicts.items()}
            )
            metrics[f"{prefix}prompts"] = len(places)
        return metrics

    def win_rates(self, verdicts: Mapping[str, PromptVerdicts]) -> dict[str, float]:
        """Win rates by their names. Prints why one that is length-controlled is not determined."""
        rates: dict[str, float] = {}
        for name, (won, judged, preferred, longer) in verdicts.items():
            rates |= win_rate(name, won, judged)
            try:
                rates[f"{name}_length_controlled"] = length_controlled(preferred, longer)
            except NotDeterminedError as error:
                self.accelerator.print(f"no {name}_length_controlled: {error}")
        return rates

    @torch.no_grad()
    def sequence_log_ratios(self, groups: list[Group], reference: Reference) -> Tensor:
        """log π(y|x) − log π_ref(y|x) of each response, [P, K] fp32."""
        groups, local = with_tensor_group(self.policy, groups)
        rows = [row.to(self.accelerator.device) for row in pack_groups(groups, self.packing)]
        logprobs = map_rows_in_lockstep(rows, partial(labeled_logprobs, self.policy))
        return sums_by_group(
            rows, [ours - ref for ours, ref in zip(logprobs, reference(rows), strict=True)]
        )[local]


def win_rate(name: str, won: np.ndarray, judged: np.ndarray) -> dict[str, float]:
    """The share of comparisons that were won, and its 95% interval over prompts; without a verdict
    1/2, within 0 and 1. won: points of each prompt, [P], half a point for a tie. judged: the
    prompt's comparisons with a verdict, [P].
    """
    known = judged > 0
    if not known.any():
        return {name: 0.5, f"{name}_low": 0.0, f"{name}_high": 1.0}
    low, high = share_interval(won[known], judged[known]) if known.sum() > 1 else (0.0, 1.0)
    return {name: float(won.sum() / judged.sum()), f"{name}_low": low, f"{name}_high": high}


def lengths_and_ends(groups: list[Group]) -> dict[str, Tensor]:
    """Tokens of each response, and whether it lacks an end-of-sequence, [P, K] fp32 each."""
    return {"response_length": lengths(groups), "missing_eos": 1 - finished(groups).float()}
