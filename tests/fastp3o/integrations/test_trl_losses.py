"""Our objectives are TRL's losses: on batches of its own trainers, by value and by the gradient of every weight.

A policy that has moved away from its reference goes through the trainer's own loss, and through `linear_loss` with our
objective. If TRL's formula is not the paper's, the entry says how.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fastp3o.integrations.padded_pairs import PaddedBatch
from fastp3o_kernels import Groups, expose_head, linear_loss, losses

pytest.importorskip("trl", reason="the extra `integrations` is not installed")
import trl

from tests.fastp3o.integrations.trl_runs import WORDS, arguments, parts, varied

PAIRS = [{"prompt": f"Say {word}:", "chosen": f" {word}", "rejected": f" {word[::-1]} zz"} for word in WORDS]
LONGEST, K, BETA = 6, 4, 0.3


class Given(NamedTuple):
    """TRL's loss of a batch, and the batch for `linear_loss` with further options."""

    loss: Tensor
    batch: PaddedBatch
    options: dict


def dpo_batch(trainer) -> Given:
    inputs = next(iter(trainer.get_train_dataloader()))
    ref = torch.stack([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]], dim=1)
    # All chosen responses come before all rejected ones.
    pairs = torch.arange(len(inputs["input_ids"])).view(2, -1).T.flatten()
    batch = PaddedBatch(*(inputs[name][pairs] for name in ("input_ids", "attention_mask", "completion_mask")), 2)
    return Given(trainer._compute_loss(trainer.model, inputs, False), batch, {"response_tensors": {"ref": ref}})


def grpo_batch(trainer) -> Given:
    """The advantages are ours."""
    inputs = trainer.rollouts
    mask, nothing = inputs["completion_mask"], torch.zeros_like(inputs["prompt_mask"])
    batch = PaddedBatch(
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        torch.cat([inputs["prompt_mask"], mask], dim=1),
        torch.cat([nothing, mask], dim=1),
        1,
    )
    texts = trainer.processing_class.batch_decode(inputs["completion_ids"], skip_special_tokens=True)
    rewards = torch.tensor(varied(texts)).view(-1, K)
    advantages = {
        "grpo": losses.group_advantages(rewards),
        "dr_grpo": losses.group_advantages(rewards, scale=False),
    }
    response_tensors = {name: values.view(-1, 1) for name, values in advantages.items()}
    names = {"old_tokens": "old_per_token_logps", "ref_tokens": "ref_per_token_logps"}
    token_tensors = {name: inputs[theirs][mask.bool()] for name, theirs in names.items() if theirs in inputs}
    divisor = {"dapo": mask.sum(), "dr_grpo": LONGEST * len(mask)}.get(getattr(trainer, "loss_type", ""), len(mask))
    options = {"token_tensors": token_tensors, "response_tensors": response_tensors, "divisor": divisor}
    return Given(trainer._compute_loss(trainer.model, inputs), batch, options)


def token_objective(loss: Callable, advantages: str, **options) -> Callable[[Groups], Tensor]:
    def objective(groups: Groups) -> Tensor:
        return loss(groups.token_logprobs, groups["old_tokens"], groups.per_token(groups[advantages]), **options).sum()

    return objective


def grpo(groups: Groups) -> Tensor:
    kl = losses.k3(groups.token_logprobs, groups["ref_tokens"])
    return groups.means(clipped(groups) + BETA * kl).sum()


def clipped(groups: Groups) -> Tensor:
    advantages = groups.per_token(groups["grpo"])
    return losses.ppo_clip(groups.token_logprobs, groups["old_tokens"], advantages, clip_low=0.05)


def gspo(groups: Groups) -> Tensor:
    old = groups.means(groups["old_tokens"])
    means = groups.means(groups.token_logprobs)
    return losses.ppo_clip(means, old, groups["grpo"], clip_low=0.01, clip_high=0.02).sum()


def against_reference(loss: Callable, **options) -> Callable[[Groups], Tensor]:
    return lambda pairs: loss(pairs.logprobs, pairs["ref"], **options).sum()


DPO = trl.DPOTrainer, trl.DPOConfig, PAIRS, dpo_batch
GRPO = trl.GRPOTrainer, trl.GRPOConfig, None, grpo_batch
OFF_POLICY = {"num_iterations": 2, "max_completion_length": LONGEST, "num_generations": K}
OBJECTIVES = {
    "DPO": (DPO, {"loss_type": ["sigmoid"]}, against_reference(losses.dpo, beta=BETA)),
    # With means over tokens, as the authors advised TRL; the paper has sums.
    "IPO": (
        DPO,
        {"loss_type": ["ipo"]},
        lambda pairs: losses.ipo(pairs.means(pairs.token_logprobs), pairs["ref"] / pairs.lengths, tau=BETA).sum(),
    ),
    # SLiC's margin on log-ratios times β, as in RSO, and without SLiC's likelihood of a target.
    "SLiC": (
        DPO,
        {"loss_type": ["hinge"]},
        lambda pairs: losses.slic(BETA * (pairs.logprobs - pairs["ref"]), delta=1.0, weight=0.0).sum(),
    ),
    "APO-zero": (DPO, {"loss_type": ["apo_zero"]}, against_reference(losses.apo_zero, beta=BETA)),
    "APO-down": (DPO, {"loss_type": ["apo_down"]}, against_reference(losses.apo_down, beta=BETA)),
    "DiscoPOP": (
        DPO,
        {"loss_type": ["discopop"], "discopop_tau": 0.4},
        against_reference(losses.discopop, beta=BETA, tau=0.4),
    ),
    "GRPO": (GRPO, OFF_POLICY | {"loss_type": "grpo", "epsilon": 0.05, "use_bias_correction_kl": False}, grpo),
    "Dr. GRPO": (
        GRPO,
        OFF_POLICY | {"loss_type": "dr_grpo", "epsilon": 0.05, "scale_rewards": "none", "beta": 0.0},
        token_objective(losses.ppo_clip, "dr_grpo", clip_low=0.05),
    ),
    "DAPO": (
        GRPO,
        OFF_POLICY | {"loss_type": "dapo", "epsilon": 0.03, "epsilon_high": 0.06, "beta": 0.0},
        token_objective(losses.ppo_clip, "grpo", clip_low=0.03, clip_high=0.06),
    ),
    "GSPO": (
        GRPO,
        OFF_POLICY
        | {"loss_type": "grpo", "beta": 0.0}
        | {"importance_sampling_level": "sequence", "epsilon": 0.01, "epsilon_high": 0.02},
        gspo,
    ),
}


def make_trainer(kind: tuple, options: dict, folder: str, model_name: str):
    """A trainer whose policy has moved away from its reference, and from the policy that sampled its rollouts."""
    trainer_class, config_class, data, _ = kind
    reference = {"precompute_ref_log_probs": True} if kind is DPO else {}
    args = config_class(**(arguments(folder) | {"beta": BETA} | reference | options))
    more = {"reward_funcs": varied} if data is None else {}
    trainer = trainer_class(args=args, **parts(model_name, data), **more)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    expose_head(trainer.model)
    torch.manual_seed(0)
    if data is None:
        prompts = next(iter(trainer.get_train_dataloader()))
        trainer.rollouts = trainer._generate_and_score_completions(prompts)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight += 0.02 * torch.randn_like(weight)
    return trainer


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, weights = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, weights), strict=True))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_are_trls(tmp_path, tiny_model, name):
    kind, options, objective = OBJECTIVES[name]
    trainer = make_trainer(kind, options, str(tmp_path), tiny_model)
    theirs, batch, options = kind[-1](trainer)
    tokens = batch.tokens()

    def head_loss(hidden, head):
        return linear_loss(
            hidden.flatten(0, 1)[tokens.predicted_at],
            replace(head, temperature=getattr(trainer, "temperature", 1.0)),
            tokens.labels,
            tokens.cu_seqlens,
            objective,
            responses_per_group=batch.responses_per_prompt,
            **options,
        ).loss

    ours = trainer.model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, head_loss=head_loss)
    expected, found = (gradients(trainer.model, loss) for loss in (theirs, ours))
    apart = max((found[weight] - gradient).norm() / gradient.norm() for weight, gradient in expected.items())
    loss_apart = (ours - theirs).abs()
    assert all(gradient.norm() > 1e-4 for gradient in expected.values())
    assert loss_apart < 1e-5 * max(1, theirs.abs())
    assert apart < 1e-5
