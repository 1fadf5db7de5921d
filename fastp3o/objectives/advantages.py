"""Generalised advantage estimation over the tokens of packed responses, and whitening.

N tokens of S responses, one behind the other; response s has the tokens cu_seqlens[s] to cu_seqlens[s + 1].
"""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fastp3o.objectives.base import SumOverProcesses


def token_rewards(
    rewards: Tensor, logprobs: Tensor, ref_logprobs: Tensor, cu_seqlens: Tensor, *, kl_coef: float
) -> Tensor:
    """Each token's KL penalty, and at the last the response's reward (Ziegler et al. 2019): [S], [N] x 2 -> [N]."""
    kl_penalties = -kl_coef * (logprobs - ref_logprobs)
    return kl_penalties.index_add(0, cu_seqlens[1:].long() - 1, rewards)


def estimate_advantages(rewards: Tensor, values: Tensor, lengths: tuple[int, ...], *, gae_lambda: float) -> Tensor:
    """Σ_l λ^l δ_{t+l} with δ_t = r_t + V_{t+1} − V_t, V = 0 behind the last token, nothing discounted: [N] x 2 -> [N].

    Schulman et al. 2016, equation 16. A response that was cut off ends like any other.
    """
    rewards, values = (pad_sequence(list(x.split(lengths)), batch_first=True) for x in (rewards, values))
    next_values = torch.cat([values[:, 1:], values.new_zeros(len(values), 1)], dim=1)
    deltas = rewards + next_values - values
    result = torch.zeros_like(deltas)
    # Behind a response's end rewards and values are zero, so its last advantage takes nothing from there.
    behind = deltas.new_zeros(len(deltas))
    for t in range(deltas.shape[1] - 1, -1, -1):
        behind = deltas[:, t] + gae_lambda * behind
        result[:, t] = behind
    return torch.cat([advantages[:length] for advantages, length in zip(result, lengths, strict=True)])


def whiten(values: list[Tensor], sum_over_processes: SumOverProcesses) -> list[Tensor]:
    """All values of all processes with mean 0 and standard deviation 1, in tensors of the same shapes."""
    together = torch.cat(values).double()
    sums = torch.stack([together.new_tensor(len(together)), together.sum(), together.square().sum()])
    count, total, squares = sum_over_processes(sums).tolist()
    mean = total / count
    deviation = max(squares / count - mean**2, 0.0) ** 0.5
    return [((value - mean) / (deviation + 1e-8)) for value in values]
