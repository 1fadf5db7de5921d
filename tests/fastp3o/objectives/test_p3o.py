"""A reward shifted per prompt, r(x, y) + δ(x), leaves every preference as it is: whole runs with δ and without.

Rewards and δ on a grid of powers of two have exact differences in fp32. Scaling and clipping of differences are on.
"""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from fastp3o.objectives.base import Microbatch
from fastp3o.objectives.p3o import P3O, P3OConfig
from fastp3o.objectives.ppo import PPOConfig
from fastp3o.objectives.preferences import OnlineDPOConfig
from fastp3o.training.loop import train
from fastp3o.training.microbatches import MetricSums, mean_over_steps
from fastp3o_kernels import P3OLossOutput
from fastp3o_kernels.p3o.settings import METRICS
from tests.fastp3o.runs import assert_equal, config, metrics, weights, weights_of_start

UPDATES = 4
# Low enough that some differences are clipped, which test_the_bound_is_reached holds to be so.
REWARD_CLIP = 1.0


def run(model: str, folder: str, config_class: type = P3OConfig, **changes) -> dict[str, Tensor]:
    settings = {"updates": UPDATES, "inner_epochs": 2, "prompts_per_update": 4, "prompts_per_minibatch": 2}
    settings["reward"] = "rewards_for_tests:varied"
    if config_class is not OnlineDPOConfig:
        settings["reward_clip"] = REWARD_CLIP
    train(config(model, folder, config_class, **(settings | changes)))
    return weights(folder)


@pytest.mark.parametrize("K", [2, 4])
@pytest.mark.parametrize("clipping", ["joint", "separate", "none", "token"])
def test_p3o_ends_with_the_same_bits(workplace, tiny_model, clipping, K):
    settings = {"clipping": clipping, "responses_per_prompt": K}
    plain = run(tiny_model, "plain", **settings)
    shifted = run(tiny_model, "shifted", reward="rewards_for_tests:varied_and_shifted", **settings)
    assert_equal(plain, shifted)
    assert metrics("plain")[-1]["reward"] != metrics("shifted")[-1]["reward"]


@pytest.mark.parametrize("clipping", ["token", "joint"])
def test_the_share_of_prompts_without_a_gradient_counts_prompts_whatever_their_lengths(clipping):
    """One of four prompts fills its own row."""
    objective, sums = (
        P3O(P3OConfig(model="m", output_dir="o", prompts="p", reward="r", clipping=clipping)),
        MetricSums(),
    )
    for without_gradient, prompts in ((1.0, 1.0), (0.0, 3.0)):
        means = dict.fromkeys(METRICS, torch.tensor(without_gradient))
        counts = dict.fromkeys(set(METRICS) - {"ratio_max"}, torch.tensor(prompts))
        output = P3OLossOutput(torch.zeros(()), means, counts)
        microbatch = Microbatch(SimpleNamespace(labelled_at=None), *[torch.empty(0)] * 5)
        sums.add(objective.loss(lambda *_, output=output: output, microbatch, 1.0)[1])
    fraction = mean_over_steps(Accelerator(cpu=True), [sums.read()])["zero_gradient_fraction"]
    assert fraction.item() == pytest.approx(0.25)


def test_the_bound_is_reached(workplace, tiny_model):
    bounded = run(tiny_model, "bounded")
    free = run(tiny_model, "free", reward_clip=0.0)
    assert not all(torch.equal(bounded[name], free[name]) for name in free)


def test_online_dpo_ends_with_the_same_bits(workplace, tiny_model):
    settings = {"config_class": OnlineDPOConfig}
    plain = run(tiny_model, "plain", **settings)
    assert_equal(plain, run(tiny_model, "shifted", reward="rewards_for_tests:varied_and_shifted", **settings))


@pytest.mark.parametrize("clipping", ["joint", "separate", "none", "token"])
def test_off_the_grid_p3o_differs_by_the_rounding_of_the_shift(workplace, tiny_model, clipping):
    plain = run(tiny_model, "plain", reward="rewards_for_tests:irregular", clipping=clipping)
    shifted = run(tiny_model, "shifted", reward="rewards_for_tests:irregular_and_shifted", clipping=clipping)
    assert 0 < distance(plain, shifted) < 1e-3 * distance(plain, weights_of_start(tiny_model))


@pytest.mark.parametrize("scaling", ["absolute", "none"])
def test_ppo_goes_elsewhere(workplace, tiny_model, scaling):
    settings = {"config_class": PPOConfig, "reward_scaling": scaling, "reward_clip": 0.0}
    plain = run(tiny_model, "plain", **settings)
    shifted = run(tiny_model, "shifted", reward="rewards_for_tests:varied_and_shifted", **settings)
    assert distance(plain, shifted) > 0.1 * distance(plain, weights_of_start(tiny_model))


def test_p3o_with_the_deviation_of_absolute_rewards_goes_elsewhere(workplace, tiny_model):
    settings = {"reward_scaling": "absolute", "reward_clip": 0.0, "updates": 6}
    plain = run(tiny_model, "plain", **settings)
    shifted = run(tiny_model, "shifted", reward="rewards_for_tests:varied_and_shifted", **settings)
    assert distance(plain, shifted) > 0.1 * distance(plain, weights_of_start(tiny_model))


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    return sum((first[name] - second[name]).double().square().sum().item() for name in second) ** 0.5
