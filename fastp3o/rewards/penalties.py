"""What is subtracted from rewards for the form of a response, whatever it says."""

import torch
from torch import Tensor

from fastp3o.rewards.config import PenaltyConfig
from fastp3o.rollouts.rollouts import Rollouts
from fastp3o_kernels.overlong_penalty import overlong_penalty


def penalties(rollouts: Rollouts, config: PenaltyConfig, longest: int) -> dict[str, Tensor]:
    """What is subtracted from rewards, [P, K] fp32 each, 0 or more, by the names of metrics: those that are on."""
    lengths = torch.tensor(rollouts.response_lengths, dtype=torch.float32)
    found: dict[str, Tensor] = {}
    if config.missing_eos_penalty:
        found["missing_eos"] = config.missing_eos_penalty * ~torch.tensor(rollouts.finished)
    if config.length_penalty:
        found["length"] = config.length_penalty * (lengths - config.length_penalty_after).clamp(min=0)
    if config.repetition_penalty:
        shares = [[repeated_share(ids, config.repetition_ngram) for ids in group] for group in rollouts.response_ids]
        found["repetition"] = config.repetition_penalty * torch.tensor(shares)
    if config.overlong_margin:
        found["overlong"] = -overlong_penalty(lengths, longest=longest, margin=config.overlong_margin)
    return {f"penalty/{name}": values for name, values in found.items()}


def repeated_share(ids: list[int], n: int) -> float:
    """1 − different n-grams / n-grams; 0 where there is none."""
    ngrams = list(zip(*(ids[start:] for start in range(n)), strict=False))
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
