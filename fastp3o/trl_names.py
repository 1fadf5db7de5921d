"""Hints for a name that no option has: what TRL's users call fastp3o's options, which a page lists, and the nearest."""

from collections.abc import Collection
from difflib import get_close_matches

# The options that stand for a name, of which a configuration has one; or, with a space, what to say instead.
TRL_NAMES = {
    "beta": ("kl_coef",),
    "num_generations": ("responses_per_prompt",),
    "num_generations_eval": ("eval_responses_per_prompt",),
    "max_completion_length": ("max_response_tokens",),
    "max_new_tokens": ("max_response_tokens",),
    "max_prompt_length": ("max_prompt_tokens",),
    "max_length": ("max_response_tokens, beside max_prompt_tokens",),
    "per_device_train_batch_size": ("prompts_per_minibatch", "batch_size"),
    "per_device_eval_batch_size": ("eval_batch_size",),
    "generation_batch_size": ("prompts_per_update",),
    "steps_per_generation": ("prompts_per_minibatch",),
    "gradient_accumulation_steps": ("nothing to set: rows of tokens_per_row are added up to a step",),
    "num_iterations": ("inner_epochs",),
    "num_ppo_epochs": ("inner_epochs",),
    "num_train_epochs": ("epochs", "updates"),
    "max_steps": ("updates", "limit"),
    "epsilon": ("clip_range", "clip_low"),
    "cliprange": ("clip_range", "clip_low"),
    "epsilon_high": ("clip_high",),
    "vf_coef": ("value_coef",),
    "lam": ("gae_lambda",),
    "loss_type": ("objective",),
    "importance_sampling_level": ("objective gspo",),
    "scale_rewards": ("scale_advantages", "reward_scaling"),
    "mask_truncated_completions": ("mask_truncated",),
    "sync_ref_model": ("reference_every",),
    "ref_model_sync_steps": ("reference_every",),
    "ref_model_mixup_alpha": ("reference_decay",),
    "vllm_importance_sampling_cap": ("sampler_ratio_cap",),
    "vllm_importance_sampling_correction": ("sampler_ratio_cap",),
    "use_vllm": ("sampler vllm",),
    "vllm_server_base_url": ("vllm_url",),
    "vllm_server_timeout": ("vllm_time_limit",),
    "reward_funcs": ("reward",),
    "reward_model": ("reward",),
    "rpo_alpha": ("sft_coef",),
    "loss_weights": ("sft_coef",),
    "model_name_or_path": ("model",),
    "revision": ("model_revision",),
    "ref_model": ("reference",),
    "train_dataset": ("prompts", "train_data"),
    "eval_dataset": ("eval_prompts", "eval_data"),
    "dataset_name": ("prompts", "train_data"),
    "dataset_train_split": ("split",),
    "processing_class": ("nothing to set: the tokenizer is the model's",),
    "bf16": ("precision bf16-autocast",),
    "fp16": ("precision fp16",),
    "peft_config": ("lora_rank and what begins with lora_, or train(config, peft_config=...) of Python",),
    "use_peft": ("lora_rank",),
    "lora_r": ("lora_rank",),
    "lora_target_modules": ("lora_targets",),
    "load_in_4bit": ("quantize 4bit",),
    "load_in_8bit": ("quantize 8bit",),
    "optim": ("optimizer",),
    "lr_scheduler_type": ("lr_schedule",),
    "adam_epsilon": ("adam_eps",),
    "warmup_ratio": ("warmup_steps",),
    "eval_steps": ("eval_every",),
    "eval_strategy": ("eval_every",),
    "save_steps": ("save_every",),
    "save_total_limit": ("keep_checkpoints",),
    "resume_from_checkpoint": ("resume",),
    "load_best_model_at_end": ("keep_best",),
    "metric_for_best_model": ("keep_best",),
    "greater_is_better": ("best_is",),
    "hub_model_id": ("push_to_hub",),
    "hub_private_repo": ("hub_private",),
    "logging_steps": ("nothing to set: every step is in metrics.jsonl",),
    "log_completions": ("log_rollouts",),
    "packing": ("nothing to set: rows are always packed",),
    "completion_only_loss": ("train_on_prompt",),
    "center_rewards_coefficient": ("centring",),
    "torch_compile": ("compile_layers",),
    "repetition_penalty": ("ngram_penalty, of rewards: with changed logits responses are no samples of the policy",),
}


def hint(name: str, options: Collection[str]) -> str:
    """What to use in the place of a name, as the end of a message; "" if nothing is near. options: those of the
    configuration. Names of options are written as flags.
    """
    known = TRL_NAMES.get(name, ())
    chosen = next((choice for choice in known if " " in choice or choice in options), None)
    if chosen is None:
        near = get_close_matches(name, options, n=1, cutoff=0.8)
        return f"; the nearest one is --{near[0]}" if near else ""
    first = chosen.split()[0].rstrip(",")
    return f"; TRL's {name} is {'--' * (first in options)}{chosen} here"
