"""A reward shifted per prompt, r(x, y) + δ(x), leaves every preference as it is: whole runs with δ and without.

Rewards and δ on a grid of powers of two have exact differences in fp32. Scaling and clipping of differences are on.
"""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from fastp3o.objectives.base import Microbatch
from fastp3o.objectives.p3o import P3O, P3OConfig
from fastp3o.objectives.preferences import OnlineDPOConfig
from fastp3o.training.loop import train
from fastp3o.training.microbatches import MetricSums, mean_over_steps
from fastp3o_kernels import P3OLossOutput
from fastp3o_kernels.p3o.settings import METRICS
from tests.fastp3o.runs import assert_equal, config, metrics, weights


@pytest.mark.parametrize(
    ("config_class", "changes"),
    [
        (P3OConfig, {"reward_clip": 1.0, "clipping": "joint", "responses_per_prompt": 4}),
        (P3OConfig, {"reward_clip": 1.0, "clipping": "separate"}),
        (P3OConfig, {"reward_clip": 1.0, "clipping": "none", "responses_per_prompt": 4}),
        (P3OConfig, {"reward_clip": 1.0, "clipping": "token"}),
        (OnlineDPOConfig, {}),
    ],
)
def test_a_shift_of_a_prompts_rewards_leaves_the_same_bits(workplace, tiny_model, config_class, changes):
    settings = {"updates": 4, "inner_epochs": 2, "prompts_per_update": 4, "prompts_per_minibatch": 2} | changes
    for folder, reward in (("plain", "varied"), ("shifted", "varied_and_shifted")):
        train(config(tiny_model, folder, config_class, reward=f"rewards_for_tests:{reward}", **settings))
    assert metrics("plain")[-1]["reward"] != metrics("shifted")[-1]["reward"]
    assert_equal(weights("plain"), weights("shifted"))


@pytest.mark.parametrize("clipping", ["token", "joint"])
def test_the_share_of_prompts_without_a_gradient_counts_prompts_whatever_their_lengths(clipping):
    """One of four prompts fills its own row."""
    chosen = P3OConfig(model="m", output_dir="o", prompts="p", reward="r", clipping=clipping)
    objective, sums = P3O(chosen), MetricSums()
    for without_gradient, prompts in ((1.0, 1.0), (0.0, 3.0)):
        means = dict.fromkeys(METRICS, torch.tensor(without_gradient))
        counts = dict.fromkeys(set(METRICS) - {"ratio_max"}, torch.tensor(prompts))
        output = P3OLossOutput(torch.zeros(()), means, counts)
        microbatch = Microbatch(SimpleNamespace(labelled_at=None), *[torch.empty(0)] * 5)
        sums.add(objective.loss(lambda *_, output=output: output, microbatch, 1.0)[1])
    fraction = mean_over_steps(Accelerator(cpu=True), [sums.read()])["zero_gradient_fraction"]
    assert fraction.item() == pytest.approx(0.25)
