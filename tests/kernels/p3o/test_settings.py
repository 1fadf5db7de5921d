from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from fastp3o_kernels import P3OSettings


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clipping": "both"}, "clipping must be one of joint, separate, none, token, got 'both'"),
        ({"kl_reward": "old"}, "kl_reward must be one of current, rollout, got 'old'"),
        ({"clip_range": 0}, "clip_range must be above 0, got 0"),
        ({"clip_range": float("nan")}, "clip_range must be above 0, got nan"),
        ({"ratio_cap": 0.5}, "ratio_cap must be at least 1, got 0.5"),
        ({"sampler_ratio_cap": 0.9}, "sampler_ratio_cap must be at least 1, got 0.9"),
        ({"kl_coef": -0.1}, "kl_coef must be 0 or more and finite, got -0.1"),
        ({"kl_coef": float("inf")}, "kl_coef must be 0 or more and finite, got inf"),
        ({"clip_range": "0.2"}, "clip_range must be a number, got '0.2'"),
        ({"ratio_cap": None}, "ratio_cap must be a number, got None"),
        ({"kl_coef": torch.tensor(0.1)}, r"kl_coef must be a number, got tensor\(0.1000\)"),
    ],
)
def test_a_wrong_value_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        P3OSettings(**wrong)


def test_they_do_not_change():
    with pytest.raises(FrozenInstanceError):
        P3OSettings().clip_range = 0.3


def test_every_setting_is_explained():
    assert all(setting.metadata["help"] for setting in fields(P3OSettings))
