"""Reward and sequence KL of a policy on a fixed set of prompts: one point of the paper's KL-reward
frontier.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor

from fastp3o.evaluation.interval import share_interval
from fastp3o.evaluation.rival import preferences
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


@dataclass(frozen=True)
class Evaluation:
    """Samples responses to every prompt, always with the same seed, and rewards them. rewards: keys
    are the names of their means. prompts: with the columns that rewards ask for. sets: places of
    prompts, whose own means are `set/NAME/...`. greedy: samples the most likely tokens, for
    `greedy/...`. rival: the rewards, [P, K] each, of the responses to this process's prompts that
    the policy's are compared with; None if they are not.
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
    rival: Mapping[str, Tensor] | None = None

    def __call__(self) -> dict[str, float]:
        """Means over prompts of: rewards (no penalties), KL to the reference, if there is one, in
        nats per sequence (log π − log π_ref of the samples), response length in tokens, share
        without end-of-sequence. `_std` is the standard deviation over prompts. And means of what
        rewards log. Against a rival also win rates, with `_low` and `_high`, their 95% interval
        over prompts; missing verdicts count for nothing.
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
        wins = {} if self.rival is None else preferences(self.rewards, with_deviation, self.rival)
        logged = logged_means(self.rewards)
        values = with_deviation | lengths_and_ends(groups)
        if self.greedy is not None:
            groups = self.greedy(prompts, 1, self.seed)
            with self.accelerator.autocast():
                likeliest = rewarded(self.rewards, groups) | lengths_and_ends(groups)
            values |= {f"greedy/{name}": value for name, value in likeliest.items()}
            if self.rival is not None:
                of_greedy = preferences(self.rewards, likeliest, self.rival)
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
            name: (table.nansum(dim=1), (~table.isnan()).sum(dim=1)) for name, table in wins.items()
        }
        points = {
            name: [np.array(gather_object(part.tolist()))[order.numpy()] for part in parts]
            for name, parts in verdicts.items()
        }
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
            for name, (won, judged) in points.items():
                metrics |= win_rate(
                    prefix + name,
                    won[places.start : places.stop],
                    judged[places.start : places.stop],
                )
            metrics[f"{prefix}prompts"] = len(places)
        return metrics | logged

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
