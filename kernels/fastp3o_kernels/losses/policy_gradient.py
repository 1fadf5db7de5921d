"""REINFORCE and its baselines; PPG, the unclipped gradient of pairs. K responses to each of P prompts."""

from torch import Tensor


def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """−(r − b) log π of each response or token (Williams 1992); b, whatever does not depend on it, is in `advantages`.

    On-policy: the samples are of the policy that is differentiated. Any shape.
    """
    return -advantages.detach() * logprobs


def rloo_advantages(rewards: Tensor) -> Tensor:
    """r minus the mean reward of the prompt's other K − 1 responses, [P, K] -> [P, K] (REINFORCE leave-one-out, Kool,
    van Hoof and Welling 2019; arXiv 2402.14740).

    Raises ValueError where K is 1.
    """
    K = rewards.shape[1]
    if K < 2:
        raise ValueError("leave-one-out advantages need 2 responses or more to a prompt, got rewards of shape [P, 1]")
    return (rewards - rewards.mean(1, keepdim=True)) * (K / (K - 1))


def ppg(logprobs: Tensor, rewards: Tensor) -> Tensor:
    """−(r1 − r2) / 2 (log π(y1) − log π(y2)), the mean over pairs of a prompt's responses, [P, K] -> [P]: the pairwise
    policy gradient, on-policy (arXiv 2310.00212, equation 6).

    That mean is −Σ (r − mean r) log π / (K − 1), a K-th of the sum that RLOO takes.
    """
    K = rewards.shape[1]
    centred = rewards - rewards.mean(1, keepdim=True)
    return reinforce(logprobs, centred).sum(1) / (K - 1)
