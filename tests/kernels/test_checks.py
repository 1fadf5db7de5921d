import re

import pytest
import torch

from fastp3o_kernels import (
    P3OSettings,
    logits_p3o_loss,
    p3o_loss,
    sequence_logprobs,
    token_logprobs,
    token_p3o_loss,
)

NAN, INF = float("nan"), float("inf")


def arguments(settings=None, **changes):
    given = {
        "logits": torch.randn(6, 9),
        "labels": torch.arange(6),
        "cu_seqlens": torch.tensor([0, 2, 3, 5, 6]),
        "old_logprobs": torch.zeros(2, 2),
        "ref_logprobs": torch.zeros(2, 2),
        "rewards": torch.zeros(2, 2),
        "settings": P3OSettings(**(settings or {})),
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
        ({"cu_seqlens": torch.tensor([1, 2, 3, 5, 6])}, "cu_seqlens[0] must be 0, got 1"),
        ({"cu_seqlens": torch.tensor([0, 3, 2, 5, 6])}, "cu_seqlens[2] = 2 must not be below cu_seqlens[1] = 3"),
        ({"cu_seqlens": torch.tensor([0, 2, 3, 5, 7])}, "cu_seqlens[4] = 7 must be the number of tokens, 6"),
        ({"cu_seqlens": torch.tensor([0, 2, 3, 6])}, "with 2 responses to each prompt their number must be a multiple"),
        ({"cu_seqlens": torch.tensor([0.0, 2, 3, 5, 6])}, "cu_seqlens must be int32 or int64"),
        ({"rewards": torch.tensor([[0.0, 0.0], [0.0, NAN]])}, "rewards[1, 1] is NaN: response 2 of prompt 1"),
        ({"old_logprobs": torch.tensor([[NAN, 0.0], [0.0, 0.0]])}, "old_logprobs[0, 0] is NaN"),
        (
            {"old_logprobs": torch.tensor([[0.0, -INF], [0.0, 0.0]])},
            "old_logprobs[0, 1] is -inf: response 2 of prompt 0",
        ),
        ({"rewards": torch.tensor([[0.0, 0.0], [INF, 0.0]])}, "rewards[1, 0] is inf: response 1 of prompt 1"),
        (
            {"logits": torch.zeros(6, 9).to(torch.float8_e4m3fn)},
            "logits must be of a floating dtype of 16 bits or more",
        ),
        ({"temperature": INF}, "temperature must be above 0 and finite, got inf"),
        ({"temperature": torch.tensor(2.0)}, "temperature must be a number, got tensor(2.)"),
        ({"temperature": "2"}, "temperature must be a number, got '2'"),
        ({"settings": {"kl_coef": INF}}, "kl_coef must be 0 or more and finite, got inf"),
        ({"ref_logprobs": torch.zeros(3, 2)}, "ref_logprobs must have shape [2, 2]"),
        ({"rewards": torch.zeros(2, 2, device="meta")}, "rewards"),
        ({"settings": {"clipping": "both"}}, "clipping must be one of joint, separate, none, token"),
        ({"settings": {"kl_reward": "old"}}, "kl_reward must be one of"),
        ({"settings": {"clip_range": 0.0}}, "clip_range must be above 0"),
        ({"settings": {"ratio_cap": 0.5}}, "ratio_cap must be at least 1"),
        ({"settings": {"kl_coef": -0.1}}, "kl_coef must be 0 or more"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"settings": {"clipping": "token"}}, "needs old_token_logprobs"),
        (
            {"settings": {"clipping": "token"}, "old_token_logprobs": torch.zeros(5)},
            "old_token_logprobs must have shape [6]",
        ),
        ({"old_token_logprobs": torch.zeros(6)}, 'old_token_logprobs is for clipping="token" only'),
        ({"impl": "cuda"}, "impl must be"),
    ],
)
def test_wrong_input_is_named(changes, message, impl):
    with pytest.raises(ValueError, match=re.escape(message)):
        logits_p3o_loss(**arguments(**({"impl": impl} | changes)))


def test_the_other_operations_check_too():
    with pytest.raises(ValueError, match=r"labels\[0\] = 9 must be from 0 to 4 or ignore_index"):
        token_logprobs(torch.randn(1, 5), torch.tensor([9]))
    with pytest.raises(ValueError, match="must be the number of tokens, 4"):
        sequence_logprobs(torch.zeros(4), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"logprobs must have shape \[P, K\]"):
        p3o_loss(torch.zeros(4), torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"token_logprobs must have shape \[N\]"):
        token_p3o_loss(torch.zeros(2, 2), torch.tensor([0, 1, 2]), *[torch.zeros(1, 2)] * 3)


@pytest.mark.gpu
def test_values_on_a_gpu_are_looked_at_only_on_request(monkeypatch):
    given = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in arguments().items()}
    given["labels"][2] = 9
    assert logits_p3o_loss(**given).loss.isnan()
    monkeypatch.setenv("FASTP3O_DEBUG", "1")
    with pytest.raises(ValueError, match="labels"):
        logits_p3o_loss(**given)
