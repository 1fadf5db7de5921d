"""The best that any policy can do at a KL: the fine-tuned policy tilted by exp(reward), from weighted samples.

max_π E_π[r] − β KL(π || π_SFT) has the solution π ∝ π_SFT exp(r / β). Weights exp(r / β) on samples of π_SFT give its
reward and its KL without training anything, as long as the effective sample size stays large.
"""

import numpy as np

from benchmarks.frontier.tasks.groups import group_of
from benchmarks.frontier.tasks.task import TASK_SETTINGS, Task, load_scores, sample

SAMPLES = 512
PROMPTS = 128


def optimum(task: Task) -> list[dict[str, float]]:
    """Points of the curve from small KL to large, means over prompts: kl in nats per response, reward_gain in
    the task's standard deviations, and ess, the effective sample size.
    """
    rewards = sampled_rewards(task)
    return [point(rewards, beta) for beta in np.geomspace(20.0, 0.1, 60)]


def point(rewards: np.ndarray, beta: float) -> dict[str, float]:
    """Rewards [prompts, samples] of the fine-tuned policy's own responses."""
    logits = rewards / beta
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    # KL(w || uniform), which estimates KL(π || π_SFT); 0 log 0 is 0.
    kl = np.where(weights > 0, weights * np.log(np.maximum(weights, 1e-300) * rewards.shape[1]), 0.0).sum(axis=1)
    gain = (weights * rewards).sum(axis=1) - rewards.mean(axis=1)
    ess = 1 / np.square(weights).sum(axis=1)
    values = {"kl": kl.mean(), "reward_gain": gain.mean(), "ess": ess.mean()}
    return {name: float(f"{value:.5g}") for name, value in values.items()}


def sampled_rewards(task: Task) -> np.ndarray:
    """Standardised rewards of SAMPLES responses to each evaluation prompt, [prompts, SAMPLES]."""
    settings = TASK_SETTINGS[group_of(task.name)]
    rollouts = sample(
        task.policy,
        task.eval_prompts,
        limit=PROMPTS,
        max_prompt_tokens=settings["max_prompt_tokens"],
        max_response_tokens=settings["max_response_tokens"],
        responses_per_prompt=SAMPLES,
        batch_size=4,
    )
    scores = load_scores(task.reward_model, task.policy)(rollouts)
    return (scores.double().numpy() - task.reward_mean) / task.reward_std
