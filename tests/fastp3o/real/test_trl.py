"""GRPO on a real model beside TRL's: `GRPOTrainer` samples, rewards and computes the advantages and
the loss of padded batches; ours is computed of the same tokens in packed rows, in fp32.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from fastp3o.models.loading import load_policy
from fastp3o.objectives.base import Microbatch
from fastp3o.objectives.config.policy_gradient import GRPOConfig
from fastp3o.packing.pack import Packing, pack
from tests.fastp3o.real.pretrained import MODEL, PAIRS, needs_model

trl = pytest.importorskip("trl", reason="the extra `integrations` is not installed")
pytestmark = needs_model

PROMPTS, RESPONSES = [pair["prompt"] for pair in PAIRS[:2]], 4
MOVED = 0.2  # deviation of old and reference log-probs of a token from the policy's, in nats


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [sum(letter in "aeiou" for letter in completion) / 4 for completion in completions]


@pytest.fixture
def trainer(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """TRL's, with the policy that is compared."""
    monkeypatch.setenv("CI", "true")  # TRL reports that it is used, except in CI
    args = trl.GRPOConfig(
        output_dir=str(tmp_path),
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=len(PROMPTS) * RESPONSES,
        num_generations=RESPONSES,
        max_completion_length=12,
        loss_type="grpo",
        use_bias_correction_kl=False,  # k3 as in the paper, without a ratio
        beta=0.0,  # else it loads a reference; the test brings its log-probs
    )
    return trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=vowels,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
    )


@pytest.fixture
def rollouts(trainer: Any) -> dict[str, Tensor]:
    """TRL's rollouts, with old and reference log-probs as if the policy had moved since."""
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    batch = [{"prompt": prompt} for prompt in PROMPTS for _ in range(RESPONSES)]
    inputs = trainer._generate_and_score_completions(batch)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    with torch.no_grad():
        logps, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, inputs["completion_ids"].shape[1]
        )
    generator = torch.Generator().manual_seed(0)
    for name in ("old", "ref"):
        noise = torch.randn(logps.shape, generator=generator)
        inputs[f"{name}_per_token_logps"] = logps + MOVED * noise
    return inputs


def kept(inputs: dict[str, Tensor], what: str, part: str) -> list[Tensor]:
    """The values of each response's, or prompt's, tokens without padding."""
    masks = inputs[f"{part}_mask"].bool()
    return [values[mask] for values, mask in zip(inputs[what], masks, strict=True)]


@pytest.mark.parametrize("kl_coef", [0.0, 0.04])
def test_grpo_has_the_loss_and_the_gradient_of_trl(
    trainer: Any, rollouts: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase, kl_coef: float
):
    """Of all parameters; without a KL, and with k3."""
    trainer.beta = kl_coef
    trainer.model.zero_grad()
    expected = trainer._compute_loss(trainer.model, rollouts)
    expected.backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters()}

    config = GRPOConfig(
        model=MODEL,
        output_dir="",
        prompts="",
        reward="",
        responses_per_prompt=RESPONSES,
        kl_coef=kl_coef,
        kl_estimator="k3" if kl_coef else "k1",
    )
    prompts = [ids.tolist() for ids in kept(rollouts, "prompt_ids", "prompt")[::RESPONSES]]
    responses = [ids.tolist() for ids in kept(rollouts, "completion_ids", "completion")]
    groups = [responses[first : first + RESPONSES] for first in range(0, len(responses), RESPONSES)]
    texts = tokenizer.batch_decode(rollouts["completion_ids"], skip_special_tokens=True)
    (row,) = pack(prompts, groups, Packing(tokens_per_row=8192))
    order = [group * RESPONSES + k for group in row.groups for k in range(RESPONSES)]
    old, ref = (
        torch.cat([kept(rollouts, f"{name}_per_token_logps", "completion")[one] for one in order])
        for name in ("old", "ref")
    )
    rewards = torch.tensor(vowels(texts)).view(-1, RESPONSES)[list(row.groups)]
    policy = load_policy(MODEL, trains=True).train()
    loss, _ = config.build().loss(policy, Microbatch(row, rewards, old, ref), len(groups))
    loss.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=0, abs=2e-6)
    ours = {
        name.removeprefix("model."): p.grad
        for name, p in policy.named_parameters()
        if p.grad is not None
    }
    assert set(ours) == set(gradients)
    error, norm = (
        sum(values.double().square().sum() for values in parts)
        for parts in ([ours[name] - gradients[name] for name in ours], gradients.values())
    )
    assert norm > 0
    assert (error / norm).sqrt() < 5e-5
