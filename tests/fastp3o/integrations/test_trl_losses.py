"""Our objectives are TRL's losses: on batches of its own trainers, by value and by the gradient of every weight.

A policy that has moved away from its reference goes through the trainer's own loss, and through `linear_loss` with our
objective. The differences are printed at the end of the run. If TRL's formula is not the paper's, the entry says how.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fastp3o.integrations.padded_pairs import PaddedBatch, padded_logprobs
from fastp3o_kernels import Groups, expose_head, linear_loss, losses

pytest.importorskip("trl", reason="the extra `integrations` is not installed")
import trl
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from tests.fastp3o.integrations.trl_runs import WORDS, arguments, parts, varied

LABELLED = [{"prompt": f"Say {word}:", "completion": f" {word[:4]}", "label": word < "i"} for word in WORDS]
PAIRS = [{"prompt": f"Say {word}:", "chosen": f" {word}", "rejected": f" {word[::-1]} zz"} for word in WORDS]
LONGEST, K, BETA = 6, 4, 0.3


class Given(NamedTuple):
    """TRL's loss of a batch, and the batch for `linear_loss` with further options."""

    loss: Tensor
    batch: PaddedBatch
    options: dict


def side_by_side(input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor) -> PaddedBatch:
    """A batch of pairs from rows in which all chosen responses come before all rejected ones."""
    order = torch.arange(len(input_ids)).view(2, -1).T.flatten()
    return PaddedBatch(input_ids, attention_mask, response_mask, 2, order)


def dpo_batch(trainer) -> Given:
    inputs = next(iter(trainer.get_train_dataloader()))
    ref = torch.stack([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]], dim=1)
    batch = side_by_side(*(inputs[name] for name in ("input_ids", "attention_mask", "completion_mask")))
    return Given(trainer._compute_loss(trainer.model, inputs, False), batch, {"response_tensors": {"ref": ref}})


def kto_batch(trainer) -> Given:
    inputs = next(iter(trainer.get_train_dataloader()))
    batch, mismatched = (
        PaddedBatch(*(inputs[prefix + name] for name in ("input_ids", "attention_mask", "completion_mask")), 1)
        for prefix in ("", "KL_")
    )
    reference_point = losses.kto_reference_point(
        padded_logprobs(trainer.model, mismatched), inputs["ref_KL_logps"][:, None]
    )
    known = {"ref": inputs["ref_logps"], "desirable": torch.as_tensor(inputs["label"]).bool()}
    known["reference_point"] = reference_point.expand(len(batch.input_ids))
    response_tensors = {name: values[:, None] for name, values in known.items()}
    return Given(trainer._compute_loss(trainer.model, inputs, False), batch, {"response_tensors": response_tensors})


def grpo_batch(trainer) -> Given:
    """The advantages are ours; RLOO's old log-probs are those of whole responses."""
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
        "rloo": losses.rloo_advantages(rewards),
        "grpo": losses.group_advantages(rewards),
        "dr_grpo": losses.group_advantages(rewards, scale=False),
    }
    response_tensors = {name: values.view(-1, 1) for name, values in advantages.items()}
    if "old_logps" in inputs:
        response_tensors["old"] = inputs["old_logps"][:, None]
    names = {"old_tokens": "old_per_token_logps", "ref_tokens": "ref_per_token_logps"}
    token_tensors = {name: inputs[theirs][mask.bool()] for name, theirs in names.items() if theirs in inputs}
    divisor = {"dapo": mask.sum(), "dr_grpo": LONGEST * len(mask)}.get(getattr(trainer, "loss_type", ""), len(mask))
    options = {"token_tensors": token_tensors, "response_tensors": response_tensors, "divisor": divisor}
    return Given(trainer._compute_loss(trainer.model, inputs), batch, options)


def cpo_batch(trainer) -> Given:
    inputs = next(iter(trainer.get_train_dataloader()))
    padding = {"padding_value": trainer.processing_class.pad_token_id}
    both = trainer.concatenated_inputs(inputs, **padding)
    ids, attended, labels = (both[f"concatenated_{name}"] for name in ("input_ids", "attention_mask", "labels"))
    is_response = labels != -100
    labelled = is_response
    if isinstance(trainer, ORPOTrainer):  # whose likelihood includes prompts
        labelled = attended.bool() & (torch.arange(ids.shape[1]) > 0)
    batch = side_by_side(ids, attended, labelled)
    chosen = len(ids) // 2
    group_tensors = {"weight": torch.full((chosen,), chosen / labelled[:chosen].sum())}
    token_tensors = {"is_response": batch.tokens().select(is_response).float()}
    loss, _ = trainer.get_batch_loss_metrics(trainer.model, inputs)
    return Given(loss, batch, {"group_tensors": group_tensors, "token_tensors": token_tensors})


def cpo(pairs: Groups) -> Tensor:
    weight = pairs["weight"][0]
    return losses.cpo(pairs.logprobs, beta=BETA, weight=weight).sum()


def orpo(pairs: Groups) -> Tensor:
    own = pairs["is_response"]
    means = pairs.sums(pairs.token_logprobs * own) / pairs.sums(own)
    without_likelihood = losses.orpo(means, weight=BETA) + means[:, 0]
    return (without_likelihood - pairs["weight"] * pairs.logprobs[:, 0]).sum()


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


def grpo_with_weighted_kl(groups: Groups) -> Tensor:
    ratios = (groups.token_logprobs - groups["old_tokens"]).exp()
    kl = ratios * losses.k3(groups.token_logprobs, groups["ref_tokens"])
    return groups.means(clipped(groups) + BETA * kl).sum()


def gspo(groups: Groups) -> Tensor:
    old = groups.means(groups["old_tokens"])
    means = groups.means(groups.token_logprobs)
    return losses.ppo_clip(means, old, groups["grpo"], clip_low=0.01, clip_high=0.02).sum()


def kto(responses: Groups) -> Tensor:
    known = (responses[name] for name in ("ref", "desirable", "reference_point"))
    weights = {"desirable_weight": 1.2, "undesirable_weight": 0.7}
    return losses.kto(responses.logprobs, *known, beta=BETA, **weights).sum()


def against_reference(loss: Callable, **options) -> Callable[[Groups], Tensor]:
    return lambda pairs: loss(pairs.logprobs, pairs["ref"], **options).sum()


DPO = trl.DPOTrainer, trl.DPOConfig, PAIRS, dpo_batch
KTO = trl.KTOTrainer, trl.KTOConfig, LABELLED, kto_batch
GRPO = trl.GRPOTrainer, trl.GRPOConfig, None, grpo_batch
RLOO = trl.RLOOTrainer, trl.RLOOConfig, None, grpo_batch
CPO = CPOTrainer, CPOConfig, PAIRS, cpo_batch
ORPO = ORPOTrainer, ORPOConfig, PAIRS, cpo_batch
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
    "KTO": (KTO, {"desirable_weight": 1.2, "undesirable_weight": 0.7}, kto),
    "GRPO": (GRPO, OFF_POLICY | {"loss_type": "grpo", "epsilon": 0.05, "use_bias_correction_kl": False}, grpo),
    # TRL's default multiplies the KL by the ratio, which the paper does not.
    "GRPO, KL weighted": (GRPO, OFF_POLICY | {"loss_type": "grpo", "epsilon": 0.05}, grpo_with_weighted_kl),
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
    # The gradient is REINFORCE's with these advantages, but through a clipped ratio, so that old rollouts serve.
    "RLOO": (
        RLOO,
        OFF_POLICY | {"epsilon": 0.1, "beta": 0.0},
        lambda groups: losses.ppo_clip(groups.logprobs, groups["old"], groups["rloo"], clip_low=0.1).sum(),
    ),
    # The likelihood is a mean over the tokens of a batch; in the paper it is each response's sum.
    "CPO": (CPO, {"loss_type": "sigmoid", "cpo_alpha": 1.0}, cpo),
    "SimPO": (
        CPO,
        {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.2},
        lambda pairs: losses.simpo(pairs.means(pairs.token_logprobs), beta=BETA, gamma=0.2).sum(),
    ),
    # The likelihood is that of prompt and response, and a mean over the batch; in the paper it is each response's mean.
    "ORPO": (ORPO, {}, orpo),
}


def make_trainer(kind: tuple, options: dict, folder: str, model_name: str):
    """A trainer whose policy has moved away from its reference, and from the policy that sampled its rollouts."""
    trainer_class, config_class, data, _ = kind
    reference = {"precompute_ref_log_probs": True} if kind in (DPO, KTO) else {}
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
def test_loss_and_gradient_are_trls(tmp_path, tiny_model, record_property, name):
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
    row = name, f"{ours:.6f}", f"{theirs:.6f}", f"{loss_apart:.1e}", f"{apart:.1e}"
    record_property("against TRL", row)
    assert all(gradient.norm() > 1e-4 for gradient in expected.values())
    assert loss_apart < 1e-5 * max(1, theirs.abs())
    assert apart < 1e-5
