"""P3O on the rollouts of TRL's GRPOTrainer (1.15, 1.16). K responses to a prompt."""

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from fastp3o.integrations.padded_pairs import PaddedBatch, padded_p3o_loss
from fastp3o.integrations.trl.linear_logprobs import linear_logprobs_in_trl
from fastp3o_kernels import P3OSettings, expose_head

# Options that GRPO's losses read and P3O's does not.
GRPO_ONLY = (
    "cast_lm_head_to_fp32",
    "delta",
    "entropy_coef",
    "epsilon_high",
    "importance_sampling_level",
    "loss_type",
    "multi_objective_aggregation",
    "off_policy_mask_threshold",
    "top_entropy_quantile",
    "use_adaptive_entropy",
    "use_bias_correction_kl",
)

# For the model cards that TRL writes.
PAPER = {
    "title": "Pairwise Proximal Policy Optimization: Harnessing Relative Feedback for LLM Alignment",
    "id": "2310.00212",
    "citation": """\
@article{wu2023pairwise,
    title        = {{Pairwise Proximal Policy Optimization: Harnessing Relative Feedback for LLM Alignment}},
    author       = {Tianhao Wu and Banghua Zhu and Ruoyu Zhang and Zhaojin Wen and Kannan Ramchandran and Jiantao Jiao},
    year         = 2023,
    eprint       = {arXiv:2310.00212}
}""",
}


@dataclass
class TRLP3OConfig(GRPOConfig):
    """GRPOConfig for P3O: beta is the weight of the KL, epsilon the clip range, num_generations K.
    Raises ValueError for options of GRPO's losses, which would be ignored, and for batches that
    would part siblings.
    """

    num_generations: int = field(
        default=2, metadata={"help": "K, responses to each prompt; 2 in the paper."}
    )
    beta: float = field(
        default=0.05, metadata={"help": "Weight of the KL to the reference; 0 for no reference."}
    )
    scale_rewards: str = field(
        default="none",
        metadata={"help": 'P3O compares rewards of one prompt: "none", or "batch" for one scale.'},
    )
    vllm_importance_sampling_correction: bool = field(
        default=False,
        metadata={"help": "Must stay False: old log-probs are the training model's own."},
    )
    clipping: str = field(
        default="joint", metadata={"help": "joint (P3O-V2), separate (P3O-V1) or none."}
    )
    ratio_cap: float = field(
        default=10.0, metadata={"help": "Importance weights are kept within 1/C and C."}
    )
    kl_reward: str = field(
        default="current", metadata={"help": "Policy in the KL part of the reward: or rollout."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in fields(GRPOConfig):
            if option.name in GRPO_ONLY and getattr(self, option.name) != option.default:
                raise ValueError(
                    f"{option.name} belongs to GRPO's losses, and P3O's would ignore it: leave it out"
                )
        if self.scale_rewards not in ("none", "batch"):
            raise ValueError(
                f'scale_rewards="{self.scale_rewards}" gives every pair the same difference of rewards, which P3O '
                'learns from: set it to "none" or "batch"'
            )
        if self.vllm_importance_sampling_correction:
            raise ValueError(
                "vllm_importance_sampling_correction is GRPO's, and P3O would ignore it: set it to False"
            )
        if self.clipping == "token":
            raise ValueError(
                'clipping="token" averages over tokens, not pairs; choose joint, separate or none'
            )
        group_sizes = {"per_device_train_batch_size": self.num_generations}
        if self.eval_strategy != "no":
            group_sizes["per_device_eval_batch_size"] = (
                self.num_generations_eval or self.num_generations
            )
        for name, K in group_sizes.items():
            if K < 2 or getattr(self, name) % K:
                raise ValueError(
                    f"{name} ({getattr(self, name)}) must hold all {K} responses to a prompt, 2 or more: set it to a "
                    "multiple of the number of generations"
                )
        # Raises ValueError for a value that is not allowed.
        self.settings()

    def settings(self) -> P3OSettings:
        chosen = {name: getattr(self, name) for name in ("clipping", "ratio_cap", "kl_reward")}
        return P3OSettings(clip_range=self.epsilon, kl_coef=self.beta, **chosen)


class P3OTrainer(GRPOTrainer):
    """GRPOTrainer with P3O's loss, whose microbatches have all responses to each of their prompts.

    Everything else is GRPOTrainer's: generation, rewards, the reference, accumulation,
    num_iterations, checkpoints. Pairs with a completion that mask_truncated_completions empties
    have no gradient. Raises ValueError for args that are not a TRLP3OConfig, and for models that
    take images or have a routing loss (mixtures of experts).
    """

    _tag_names = ["trl", "p3o"]  # noqa: RUF012
    _paper = PAPER
    _buffered_inputs: list[dict] | None
    _name = "P3O"

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        if not isinstance(self.args, TRLP3OConfig):
            raise ValueError(
                f"P3OTrainer takes a TRLP3OConfig as args, and got a {type(self.args).__name__}"
            )
        if self._is_vlm or self.aux_loss_enabled:
            raise ValueError(
                "P3OTrainer takes only text, and no auxiliary loss: set router_aux_loss_coef to 0"
            )
        self.settings = self.args.settings()
        expose_head(self.model)

    def _prepare_inputs(self, generation_batch):
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        period = self.args.steps_per_generation * self.num_iterations
        if self._step % period == 0 or self._buffered_inputs is None:
            rollouts = shuffled_groups(
                self._generate_and_score_completions(generation_batch), self.num_generations
            )
            self._buffered_inputs = split_tensor_dict(rollouts, self.args.steps_per_generation)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _calculate_rewards(self, *arguments, **options):
        rewards = super()._calculate_rewards(*arguments, **options)
        if (unknown := rewards.isnan().all(dim=1)).any():
            raise ValueError(
                f"{int(unknown.sum())} of {len(rewards)} completions have no reward: each reward function returned "
                "None or NaN, and P3O needs a number for each"
            )
        return rewards

    def _get_per_token_logps_and_entropies(self, *arguments, **options):
        # Old log-probs and the reference's must be as exact as those of the loss.
        with linear_logprobs_in_trl():
            return super()._get_per_token_logps_and_entropies(*arguments, **options)

    def _compute_loss(self, model, inputs):
        mode = "train" if self.model.training else "eval"
        K = self.num_generations if mode == "train" else self.num_generations_eval
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        batch = PaddedBatch(
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            torch.cat([torch.zeros_like(inputs["prompt_mask"]), mask], dim=1),
            K,
        )
        logprobs = {
            f"{name}_logprobs": (inputs[f"{name}_per_token_logps"] * mask).sum(1).view(-1, K)
            for name in ("old", "ref")
            if inputs.get(f"{name}_per_token_logps") is not None
        }
        rewards = inputs["advantages"].view(-1, K)  # a shift per prompt changes nothing
        with self.accelerator.autocast():
            loss, metrics = padded_p3o_loss(
                model, batch, rewards, self.settings, temperature=self.temperature, **logprobs
            )
        values = self.accelerator.reduce(torch.stack(list(metrics.values())), reduction="mean")
        for name, value in zip(metrics, values.tolist(), strict=True):
            self._metrics[mode][f"p3o/{name}"].append(value)
        return loss / self.current_gradient_accumulation_steps if mode == "train" else loss


def shuffled_groups(rollouts: dict, K: int) -> dict:
    """Tensors and lists of all responses, with prompts in random order; the K responses to each
    stay neighbors.
    """
    responses = len(next(values for values in rollouts.values() if values is not None))
    order = (torch.randperm(responses // K)[:, None] * K + torch.arange(K)).flatten()

    def ordered(values):
        if isinstance(values, Tensor):
            return values[order.to(values.device)] if values.dim() else values
        return values if values is None else [values[response] for response in order]

    return {name: ordered(values) for name, values in rollouts.items()}
