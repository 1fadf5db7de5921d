"""What is wrong with an input is named: the argument, the index, what was expected and what came."""

import re

import pytest
import torch

from fastp3o_kernels import (
    Head,
    P3OSettings,
    linear_logprobs,
    logits_p3o_loss,
    p3o_loss,
    sequence_logprobs,
    token_logprobs,
    token_p3o_loss,
)
from tests.kernels.levels import Batch

NAN, INF = float("nan"), float("inf")


def arguments(**changes):
    given = {
        "logits": torch.randn(6, 9),
        "labels": torch.arange(6),
        "cu_seqlens": torch.tensor([0, 2, 3, 5, 6]),
        "old_logprobs": torch.zeros(2, 2),
        "ref_logprobs": torch.zeros(2, 2),
        "rewards": torch.zeros(2, 2),
    }
    return given | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": torch.tensor([0, 1, 9, 3, 4, 5])}, "labels[2] = 9 must be from 0 to 8"),
        ({"labels": torch.tensor([0, 1, -100, 3, 4, 5])}, "labels[2] = -100"),
        ({"labels": torch.arange(5)}, "labels must have shape [6]"),
        ({"labels": torch.arange(6.0)}, "labels must be int64 or int32"),
        ({"logits": torch.randn(1, 6, 9)}, "logits must have shape [N, V]"),
        ({"logits": torch.ones(6, 9, dtype=torch.long)}, "logits must be of a floating dtype"),
        ({"logits": torch.zeros(6, 9).to(torch.float8_e4m3fn)}, "logits must be of a floating dtype of 16 bits"),
        ({"cu_seqlens": torch.tensor([0, 3, 2, 5, 6])}, "cu_seqlens[2] = 2 must not be below cu_seqlens[1] = 3"),
        ({"cu_seqlens": torch.tensor([0, 2, 3, 5, 7])}, "cu_seqlens[4] = 7 must be the number of tokens, 6"),
        ({"rewards": torch.zeros(3, 2)}, "rewards must have shape [2, 2]"),
        ({"rewards": torch.zeros(2, 2, device="meta")}, "rewards"),
        ({"rewards": torch.tensor([[0.0, 0.0], [0.0, NAN]])}, "rewards[1, 1] is NaN: response 2 of prompt 1"),
        ({"old_logprobs": torch.tensor([[0.0, -INF], [0.0, 0.0]])}, "old_logprobs[0, 1] is -inf"),
        ({"ref_logprobs": torch.tensor([[0.0, NAN], [0.0, 0.0]])}, "ref_logprobs[0, 1] is NaN"),
        ({"sampler_logprobs": torch.zeros(2, 2, dtype=torch.long)}, "sampler_logprobs must be of a floating dtype"),
        ({"valid_responses": torch.ones(4, dtype=torch.bool)}, "valid_responses must have shape [2, 2]"),
        ({"valid_responses": torch.ones(2, 2)}, "valid_responses must be bool, got torch.float32: call .bool()"),
        ({"divisor": 0}, "divisor must be above 0, got 0"),
        ({"divisor": torch.tensor(-1)}, "divisor must be above 0, got -1"),
        ({"divisor": torch.ones(2)}, "divisor must have shape [] (one number), got [2]"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": INF}, "temperature must be above 0 and finite, got inf"),
        ({"temperature": torch.tensor(2.0)}, "temperature must be a number, got tensor(2.)"),
        ({"settings": P3OSettings(clipping="token")}, "needs old_token_logprobs"),
        ({"old_token_logprobs": torch.zeros(6)}, 'old_token_logprobs is for clipping="token" only'),
        ({"impl": "cuda"}, "impl must be"),
        ({"logits": torch.zeros(6, 9).double(), "impl": "triton"}, "computes in fp32 and got an fp64 tensor"),
    ],
)
def test_wrong_input_is_named(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        logits_p3o_loss(**arguments(**changes))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clipping": "both"}, "clipping must be one of joint, separate, none, token, got 'both'"),
        ({"kl_reward": "old"}, "kl_reward must be one of current, rollout, got 'old'"),
        ({"clip_range": 0}, "clip_range must be above 0, got 0"),
        ({"clip_range": NAN}, "clip_range must be above 0, got nan"),
        ({"clip_range": "0.2"}, "clip_range must be a number, got '0.2'"),
        ({"ratio_cap": 0.5}, "ratio_cap must be at least 1, got 0.5"),
        ({"sampler_ratio_cap": 0.9}, "sampler_ratio_cap must be at least 1, got 0.9"),
        ({"kl_coef": -0.1}, "kl_coef must be 0 or more and finite, got -0.1"),
        ({"kl_coef": INF}, "kl_coef must be 0 or more and finite, got inf"),
    ],
)
def test_a_wrong_setting_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        P3OSettings(**wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3)}, "hidden must have shape [N, D], got [3]"),
        ({"weight": torch.zeros(9, 5)}, "must share D, got [3, 4] and [9, 5]"),
        ({"weight": torch.zeros(9, 4).bfloat16()}, "hidden is torch.float32 and weight torch.bfloat16"),
        ({"bias": torch.zeros(4)}, "bias must have shape [9]"),
        ({"labels": torch.tensor([1, 9, 2])}, "labels[1] = 9 must be from 0 to 8 or ignore_index (-100)"),
        ({"softcap": 0.0}, "softcap must be above 0, or None for no cap, got 0.0"),
        ({"softcap": INF}, "softcap must be above 0, or None for no cap, got inf"),
        ({"temperature": -1.0}, "temperature must be above 0"),
        ({"memory_budget": 100}, "memory_budget of 100 bytes is less than one row"),
    ],
)
def test_what_is_wrong_with_a_head_is_named(change, message):
    given = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(9, 4), "labels": torch.tensor([1, 2, 3])} | change
    head = {name: given.pop(name) for name in ("weight", "bias", "softcap", "temperature") if name in given}
    with pytest.raises(ValueError, match=re.escape(message)):
        linear_logprobs(head=Head(**head), **given)


def test_every_operation_checks():
    four = [torch.zeros(2, 2)] * 4
    for message, call in {
        r"labels\[0\] = 9 must be from 0 to 4 or ignore_index": lambda: token_logprobs(
            torch.randn(1, 5), torch.tensor([9])
        ),
        "would overwrite logits, which is a leaf": lambda: token_logprobs(
            torch.randn(1, 5, requires_grad=True), torch.tensor([1]), inplace_backward=True
        ),
        "must be the number of tokens, 4": lambda: sequence_logprobs(torch.zeros(4), torch.tensor([0, 3])),
        r"logprobs must have shape \[P, K\]": lambda: p3o_loss(torch.zeros(4), *four[:3]),
        "K of at least 2": lambda: p3o_loss(*[torch.zeros(3, 1)] * 4),
        "token_p3o_loss or logits_p3o_loss": lambda: p3o_loss(*four, P3OSettings(clipping="token")),
        r"token_logprobs must have shape \[N\]": lambda: token_p3o_loss(four[0], [0, 1, 2], *four[:3]),
        "divisor must be above 0, got 0": lambda: Batch("objective").run(divisor=0),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("level", ["responses", "hidden"])
def test_values_are_looked_at_on_request(level, monkeypatch):
    monkeypatch.setenv("FASTP3O_DEBUG", "1")  # without it nobody looks at values on a GPU
    batch = Batch(level)
    batch.pairs.rewards[1, 0] = NAN
    with pytest.raises(ValueError, match=r"rewards\[1, 0\] is NaN"):
        batch.run()


@pytest.mark.gpu
def test_values_on_a_gpu_are_looked_at_only_on_request(monkeypatch):
    given = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in arguments().items()}
    given["labels"][2] = 9
    assert logits_p3o_loss(**given).loss.isnan()
    monkeypatch.setenv("FASTP3O_DEBUG", "1")
    with pytest.raises(ValueError, match="labels"):
        logits_p3o_loss(**given)
