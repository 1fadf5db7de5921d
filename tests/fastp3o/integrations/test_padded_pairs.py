"""P3O on padded batches is linear_p3o_loss on the responses' tokens, and the mean over single
pairs.
"""

from dataclasses import replace

import pytest
import torch

from fastp3o.integrations.padded_pairs import PaddedBatch, padded_p3o_loss
from fastp3o_kernels import P3OSettings, expose_head, linear_p3o_loss, p3o_loss
from tests.kernels.exposed_heads import IDS, MASK, gradients, tiny_causal_lm

GENERATOR = torch.Generator().manual_seed(2)


def batch_of(K: int, mask: torch.Tensor = MASK) -> PaddedBatch:
    """Rows whose first tokens are those of their prompt's first response."""
    ids = IDS.clone()
    ids[:, :4] = ids[::K, :4].repeat_interleave(K, 0)
    return PaddedBatch(ids, torch.ones_like(ids), mask, K)


def random_responses(P: int, K: int) -> dict[str, torch.Tensor]:
    values = torch.randn(3, P, K, generator=GENERATOR)
    return {
        "rewards": values[0],
        "old_logprobs": values[1] / 9 - 17,
        "ref_logprobs": values[2] / 9 - 17,
    }


def logprobs_of(model: torch.nn.Module, batch: PaddedBatch) -> torch.Tensor:
    """[P, K], from all logits."""
    logits = model(batch.input_ids, attention_mask=batch.attention_mask).logits
    tokens = logits[:, :-1].log_softmax(-1).gather(2, batch.input_ids[:, 1:, None]).squeeze(2)
    return (tokens * batch.response_mask[:, 1:]).sum(1).view(-1, batch.responses_per_prompt)


@pytest.mark.parametrize(
    ("clipping", "K"), [("joint", 2), ("joint", 4), ("separate", 4), ("none", 2)]
)
def test_it_is_linear_p3o_loss(clipping, K):
    batch, settings = batch_of(K), P3OSettings(clipping=clipping)
    given, tokens = random_responses(8 // K, K), batch.tokens()
    model = expose_head(tiny_causal_lm("llama"))
    loss, metrics = padded_p3o_loss(model, batch, settings=settings, temperature=1.5, **given)
    loss.backward()
    found = gradients(model)

    def expected(hidden, head):
        log_probs = given["old_logprobs"], given["ref_logprobs"], given["rewards"]
        at_tokens = hidden.flatten(0, 1)[tokens.predicted_at]
        head = replace(head, temperature=1.5)
        return linear_p3o_loss(
            at_tokens, head, tokens.labels, tokens.cu_seqlens, *log_probs, settings
        )

    model.zero_grad()
    output = model(batch.input_ids, attention_mask=batch.attention_mask, head_loss=expected)
    output.loss.backward()
    torch.testing.assert_close(loss, output.loss)
    torch.testing.assert_close(found, gradients(model), rtol=1e-5, atol=2e-5)
    assert metrics["pairs"] == 1
    for name in ("ratio_mean", "clip_fraction", "advantage_mean_abs", "kl"):
        torch.testing.assert_close(metrics[name], output.metrics[name])


def test_pairs_with_an_empty_response_stay_in_the_mean_without_a_gradient():
    K, mask = 4, MASK.clone()
    mask[[1, 6]] = False
    batch, settings = batch_of(K, mask), P3OSettings()
    given = random_responses(2, K)
    model = expose_head(tiny_causal_lm("llama"))
    loss, metrics = padded_p3o_loss(model, batch, settings=settings, **given)
    values = (
        logprobs_of(model, batch),
        given["old_logprobs"],
        given["ref_logprobs"],
        given["rewards"],
    )
    pairs = [
        (p, [i, j])
        for p in (0, 1)
        for i in range(K)
        for j in range(i + 1, K)
        if not {(0, 1), (1, 2)} & {(p, i), (p, j)}
    ]
    losses = [
        p3o_loss(*(value[p, both][None] for value in values), settings).loss for p, both in pairs
    ]
    torch.testing.assert_close(loss, sum(losses) / 12)
    assert metrics["pairs"] == len(pairs) / 12 == 0.5


def test_nothing_but_empty_responses_is_a_gradient_of_zero_everywhere():
    model = expose_head(tiny_causal_lm("llama"))
    batch = batch_of(2, torch.zeros_like(MASK))
    loss, metrics = padded_p3o_loss(model, batch, settings=P3OSettings(), **random_responses(4, 2))
    loss.backward()
    assert loss == metrics["pairs"] == 0
    assert len(gradients(model)) == len(list(model.parameters()))
    assert not any(gradient.any() for gradient in gradients(model).values())


def test_what_cuts_batches_or_averages_tokens_is_refused():
    model, batch = expose_head(tiny_causal_lm("llama")), batch_of(2)
    with pytest.raises(ValueError, match="DataParallel"):
        padded_p3o_loss(torch.nn.DataParallel(model), batch, torch.zeros(4, 2), P3OSettings())
    with pytest.raises(ValueError, match="mean over tokens"):
        padded_p3o_loss(model, batch, torch.zeros(4, 2), P3OSettings(clipping="token"))


def test_without_old_and_reference_logprobs_they_are_the_policys_own():
    batch, rewards = batch_of(4), random_responses(2, 4)["rewards"]
    model = expose_head(tiny_causal_lm("llama"))
    own = logprobs_of(model, batch).detach()
    found = []
    for known in (
        {},
        {"old_logprobs": own},
        {"ref_logprobs": own},
        {"old_logprobs": own, "ref_logprobs": own},
    ):
        model.zero_grad()
        loss, metrics = padded_p3o_loss(model, batch, rewards, P3OSettings(), **known)
        loss.backward()
        found.append((loss.detach(), metrics, gradients(model)))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-4, atol=2e-5)
