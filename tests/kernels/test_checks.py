"""What is wrong with an input is named: the argument, the index, what was expected and what came."""

import inspect
import re
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch

from fastp3o_kernels import (
    Head,
    P3OSettings,
    linear_logprobs,
    linear_loss,
    linear_p3o_loss,
    logits_p3o_loss,
    p3o_loss,
    response_tokens,
    sequence_logprobs,
    token_logprobs,
    token_p3o_loss,
)
from fastp3o_kernels.losses import group_advantages, rloo_advantages
from fastp3o_kernels.rows.rows import LogitsTransform

NAN, INF = float("nan"), float("inf")
TOKEN = P3OSettings(clipping="token")
HEAD = torch.zeros(3, 4), torch.zeros(9, 4), torch.tensor([1, 2, 3])


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
        (
            {"labels": torch.tensor([0, -100, 2, 3, 4, 5])},
            "drop these tokens first: `response_tokens` does",
        ),
        ({"labels": torch.arange(5)}, "labels must have shape [6]"),
        ({"labels": torch.arange(6.0)}, "labels must be int64 or int32"),
        ({"logits": torch.ones(6, 9, dtype=torch.long)}, "logits must be of a floating dtype"),
        (
            {"logits": torch.zeros(6, 9).to(torch.float8_e4m3fn)},
            "logits must be of a floating dtype of 16 bits",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 3, 2, 5, 6])},
            "cu_seqlens[2] = 2 must not be below cu_seqlens[1] = 3",
        ),
        *(
            ({"cu_seqlens": torch.tensor(offsets)}, "give [0, *lengths.cumsum(0)]")
            for offsets in ([2, 1, 2, 1], [2, 3, 5, 6], [0, 2, 3, 5])
        ),
        (
            {"ref_logprobs": None},
            "ref_logprobs must be a tensor [P, K], got None; with kl_coef 0 give zeros",
        ),
        (
            {"ref_logprobs": torch.tensor([[-9.0, -8.0], [-7.0, 1.0]])},
            "ref_logprobs[1, 1] is 1, and log-probabilities are not above 0",
        ),
        ({"old_logprobs": torch.ones(2, 2)}, "old_logprobs[0, 0] is 1, and log-prob"),
        (
            {"rewards": torch.tensor([[[0.5, 0.75], [0.25, 0.5]], [[0.5, 0.5], [0.5, 0.5]]])},
            "rewards[0, 0, 1] is 0.75 and rewards[0, 1, 0] 0.25: the difference of a pair must be",
        ),
        ({"rewards": None}, "rewards must be a tensor [P, K] or [P, K, K], got None"),
        ({"rewards": torch.zeros(3, 2)}, "rewards must have shape [2, 2]"),
        ({"rewards": torch.zeros(2, 2, device="meta")}, "rewards"),
        (
            {"rewards": torch.tensor([[0.0, 0.0], [0.0, NAN]])},
            "rewards[1, 1] is NaN: response 2 of prompt 1",
        ),
        ({"old_logprobs": torch.tensor([[0.0, -INF], [0.0, 0.0]])}, "old_logprobs[0, 1] is -inf"),
        (
            {"valid_responses": torch.ones(2, 2)},
            "valid_responses must be bool, got torch.float32: call .bool()",
        ),
        ({"divisor": 0}, "divisor must be above 0, got 0"),
        ({"divisor": "2"}, "divisor must be a number, got '2'"),
        ({"divisor": torch.ones(2)}, "divisor must have shape [] (one number), got [2]"),
        ({"temperature": torch.tensor(2.0)}, "temperature must be a number, got tensor(2.)"),
        ({"settings": TOKEN}, "needs old_token_logprobs"),
        (
            {"settings": TOKEN, "old_logprobs": None, "old_token_logprobs": torch.zeros(6)},
            "both are None",
        ),
        ({"old_token_logprobs": torch.zeros(6)}, 'old_token_logprobs is for clipping="token" only'),
        ({"impl": "cuda"}, "impl must be"),
        (
            {"logits": torch.zeros(6, 9).double(), "impl": "triton"},
            "computes in fp32 and got an fp64 tensor",
        ),
    ],
)
def test_wrong_input_is_named(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        logits_p3o_loss(**arguments(**changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(9, 5)}, "must share D, got [3, 4] and [9, 5]"),
        (
            {"weight": torch.zeros(9, 4).bfloat16()},
            "hidden is torch.float32 and weight torch.bfloat16",
        ),
        ({"bias": torch.zeros(4)}, "bias must have shape [9]"),
        ({"softcap": INF}, "softcap must be above 0, or None for no cap, got inf"),
        ({"temperature": -1.0}, "temperature must be above 0"),
        ({"softcap": True}, "softcap must be a number, got True"),
        ({"memory_budget": 60}, "memory_budget of 60 bytes is less than one row"),
    ],
)
def test_what_is_wrong_with_a_head_is_named(change, message):
    given = dict(zip(("hidden", "weight", "labels"), HEAD, strict=True)) | change
    head = {
        name: given.pop(name)
        for name in ("weight", "bias", "softcap", "temperature")
        if name in given
    }
    with pytest.raises(ValueError, match=re.escape(message)):
        linear_logprobs(head=Head(**head), **given)


def test_tokens_to_be_ignored_among_the_labels_of_a_loss_are_told_how_to_leave():
    hidden, weight, labels = HEAD[0], HEAD[1], torch.tensor([1, -100, 3])
    remedy = (
        r"labels\[1\] = -100 must be from 0 to 8.* drop these tokens first: `response_tokens` does"
    )
    with pytest.raises(ValueError, match=remedy):
        linear_loss(hidden, weight, labels, [0, 3], lambda groups: groups.logprobs.sum())
    with pytest.raises(ValueError, match=remedy):
        linear_p3o_loss(hidden, weight, labels, [0, 1, 3], *[torch.zeros(1, 2)] * 3, P3OSettings())
    with pytest.raises(ValueError, match=r"must be from 0 to 8 or ignore_index \(-100\)$"):
        linear_logprobs(hidden, weight, labels - 1)
    assert linear_logprobs(hidden, weight, labels)[1] == 0


@pytest.mark.parametrize("number", [np.float32(2), np.int64(2), Fraction(2), 2])
def test_numbers_of_any_type_are_floats_to_the_kernels(number):
    """Triton's launcher refuses numpy's, and compiles another variant for an int."""
    head, settings = (
        Head(HEAD[1], softcap=number, temperature=number),
        P3OSettings(ratio_cap=number, kl_coef=number),
    )
    transform = LogitsTransform(softcap=number, temperature=number)
    stored = (
        *(x for own in (head, transform) for x in (own.softcap, own.temperature)),
        settings.ratio_cap,
    )
    assert [(type(value), value) for value in (*stored, settings.kl_coef)] == [(float, 2.0)] * 6


FOUR = [torch.zeros(2, 2)] * 4
SUMS = *HEAD, [0, 3], lambda groups: groups.logprobs.sum()


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (
            token_logprobs,
            (torch.randn(1, 5), torch.tensor([9])),
            "labels[0] = 9 must be from 0 to 4 or ignore_index",
        ),
        (
            partial(token_logprobs, inplace_backward=True),
            (torch.zeros(3, 5, requires_grad=True), HEAD[2]),
            "is a leaf",
        ),
        (
            sequence_logprobs,
            (torch.zeros(4), torch.tensor([0, 3])),
            "end with the number of tokens (4), got 0 and 3: for lengths give",
        ),
        (p3o_loss, (torch.zeros(4), *FOUR[:3]), "logprobs must have shape [P, K]"),
        (p3o_loss, [torch.zeros(3, 1)] * 4, "K of at least 2"),
        (p3o_loss, (*FOUR[:2], None, FOUR[0]), "with kl_coef 0 give zeros"),
        (p3o_loss, (*FOUR[:3], None), "[P, K] or [P, K, K], got None"),
        *(
            (advantages, (rewards,), message)
            for advantages in (group_advantages, rloo_advantages)
            for rewards, message in (
                (torch.zeros(4), "shape [P, K] with K of at least 2"),
                (torch.zeros(4, 1), "got [4, 1]"),
                ([[1.0, 2.0]], "rewards must be a tensor, got list"),
                (torch.ones(2, 2).long(), "rewards must be of a floating dtype, got torch.int64"),
            )
        ),
        *(
            (partial(linear_loss, responses_per_group=number), SUMS, "a whole number, 1 or more")
            for number in (0, "2", 1.0, True)
        ),
        (
            partial(linear_logprobs, cu_seqlens=[0, 3], responses_per_prompt=0),
            HEAD,
            "responses_per_prompt must be a whole number, 1 or more, got 0",
        ),
        *(
            (
                partial(linear_loss, **{first: {"old": None}, second: {"old": None}}),
                SUMS,
                f"'old' is in {first} and in {second}",
            )
            for first, second in (
                ("token_tensors", "response_tensors"),
                ("response_tensors", "group_tensors"),
            )
        ),
        (
            partial(response_tokens, responses_per_prompt=0),
            (torch.ones(2, 3).long(), torch.zeros(2, 3)),
            "responses_per_prompt must be a whole number, 1 or more, got 0",
        ),
        (p3o_loss, (*FOUR, TOKEN), "token_p3o_loss or logits_p3o_loss"),
        (token_p3o_loss, (FOUR[0], [0, 1, 2], *FOUR[:3]), "token_logprobs must have shape [N]"),
        (
            partial(linear_logprobs, outputs="entropy"),
            HEAD,
            "outputs must be among entropy, mean_logit, is_top",
        ),
        (partial(token_logprobs, outputs=["entropies"]), HEAD[::2], "got ['entropies']"),
        (
            partial(P3OSettings, clipping="both"),
            (),
            "clipping must be one of joint, separate, none, token, got 'both'",
        ),
        (partial(P3OSettings, clip_range=0), (), "clip_range must be above 0, got 0"),
        (partial(P3OSettings, ratio_cap=0.5), (), "ratio_cap must be at least 1, got 0.5"),
        (
            partial(P3OSettings, sampler_ratio_cap=0.9),
            (),
            "sampler_ratio_cap must be at least 1, got 0.9",
        ),
        (partial(P3OSettings, kl_coef=INF), (), "kl_coef must be 0 or more and finite, got inf"),
        (linear_loss, (*SUMS[:4], lambda groups: groups.logprobs), "0-d tensor, got shape [1, 1]"),
        (linear_loss, (*SUMS[:4], lambda groups: 1.0), "0-d tensor, got 1.0"),
        (
            partial(linear_loss, token_tensors={"old": torch.zeros(5)}),
            SUMS,
            "old must begin with [3]",
        ),
        (
            partial(linear_loss, response_tensors={"r": torch.zeros(1)}),
            SUMS,
            "r must begin with [1, 1]",
        ),
        (partial(linear_loss, group_tensors={"r": torch.zeros(3)}), SUMS, "r must begin with [1]"),
        (
            partial(linear_loss, response_tensors={"r": [[1.0]]}),
            SUMS,
            "r must be a tensor that begins with [1, 1]",
        ),
    ],
)
def test_every_operation_checks(function, given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        function(*given)


TENSORS = {
    linear_logprobs: {"hidden": HEAD[0], "head": HEAD[1], "labels": HEAD[2]},
    linear_loss: {
        "hidden": HEAD[0],
        "head": HEAD[1],
        "labels": HEAD[2],
        "cu_seqlens": [0, 3],
        "objective": None,
    },
    linear_p3o_loss: {"hidden": torch.zeros(6, 4), "head": HEAD[1], **arguments()},
    logits_p3o_loss: arguments(),
    p3o_loss: {"logprobs": FOUR[0], **arguments()},
    response_tokens: {"input_ids": torch.ones(2, 3).long(), "response_mask": torch.zeros(2, 3)},
    sequence_logprobs: {"token_logprobs": torch.zeros(6), "cu_seqlens": [0, 6]},
    token_logprobs: {"logits": torch.zeros(3, 9), "labels": HEAD[2]},
    token_p3o_loss: {"token_logprobs": torch.zeros(6), **arguments()},
}


@pytest.mark.parametrize("function", TENSORS, ids=lambda function: function.__name__)
def test_lists_in_the_place_of_tensors_are_named(function):
    taken = inspect.signature(function).parameters
    given = {name: value for name, value in TENSORS[function].items() if name in taken}
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and name != "cu_seqlens":  # which may be a list
            with pytest.raises(ValueError, match=f"{name} must be a (tensor|Head).* got list"):
                function(**given | {name: value.tolist()})
    if "settings" in taken:
        with pytest.raises(ValueError, match=r"settings must be P3OSettings.* got dict"):
            function(**given, settings={"clipping": "joint"})


@pytest.mark.parametrize("name", ["clip_range", "kl_coef", "beta"])
@pytest.mark.parametrize(
    "loss",
    [p3o_loss, token_p3o_loss, logits_p3o_loss, linear_p3o_loss],
    ids=lambda loss: loss.__name__,
)
def test_the_error_for_an_unexpected_keyword_names_the_settings(loss, name):
    taken = inspect.signature(loss).parameters
    given = {key: value for key, value in TENSORS[loss].items() if key in taken}
    said = rf"^{loss.__name__}\(\) got an unexpected keyword argument '{name}'; .*settings=P3OSettings\("
    with pytest.raises(TypeError, match=said + ".*clip_range.*kl_coef"):
        loss(**given, **{name: 0.1})


def test_what_is_not_read_of_log_probs_and_differences_may_be_anything():
    """Responses in no pair, and zeros below the diagonal; rounding above 0 is no mistake."""
    ref = torch.tensor([[5.0, -1.0], [0.01, -2.0]])
    valid = torch.tensor([[False, True], [True, True]])
    rewards = torch.tensor([[[0.0, 0.3], [0.4, 0.0]], [[0.0, 0.5], [0.0, 0.0]]])
    given = arguments(ref_logprobs=ref, rewards=rewards, valid_responses=valid)
    assert logits_p3o_loss(**given).loss.isfinite()


def test_rewards_by_response_and_prompt_instead_of_prompt_and_response_are_named():
    six = arguments(cu_seqlens=torch.tensor([0, 1, 2, 3, 4, 5, 6]), rewards=torch.zeros(2, 3))
    six |= {name: torch.zeros(3, 2) for name in ("old_logprobs", "ref_logprobs")}
    with pytest.raises(
        ValueError,
        match=r"where rewards are \[2, 3\] and cu_seqlens has 6 responses\), got \[3, 2\]",
    ):
        logits_p3o_loss(**six)


@pytest.mark.gpu
def test_values_on_a_gpu_are_looked_at_only_on_request(monkeypatch):
    given = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in arguments().items()
    }
    given["labels"][2] = 9
    assert logits_p3o_loss(**given).loss.isnan()
    monkeypatch.setenv("FASTP3O_DEBUG", "1")
    with pytest.raises(ValueError, match="labels"):
        logits_p3o_loss(**given)
