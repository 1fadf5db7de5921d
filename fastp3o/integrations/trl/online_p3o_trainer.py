"""P3O on the rollouts of TRL's experimental OnlineDPOTrainer (1.16): two responses to a prompt, one step on them.

A microbatch has P prompts.
"""

from contextlib import nullcontext

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from transformers.training_args import OptimizerNames
from trl.data_utils import is_conversational
from trl.experimental.online_dpo import OnlineDPOTrainer

from fastp3o.integrations.padded_pairs import METRICS, PaddedBatch, padded_logprobs, padded_p3o_loss
from fastp3o.integrations.trl.p3o_trainer import PAPER
from fastp3o_kernels import P3OSettings, expose_head


class OnlineP3OTrainer(OnlineDPOTrainer):
    """OnlineDPOTrainer with P3O's loss, which depends on the difference of rewards and not only on its sign.

        OnlineP3OTrainer(model, reward_funcs=reward, args=OnlineDPOConfig(...), settings=P3OSettings(), ...)

    Generation, rewards and the reference are TRL's. Its options `beta` and `loss_type` belong to the other loss and are
    ignored. Gradients of accumulated microbatches are averaged.

    settings: clipping is "joint", "separate" or "none".

    Raises ValueError for a model that takes images.
    """

    _tag_names = ["trl", "p3o"]  # noqa: RUF012
    _name = "Online P3O"
    _paper = PAPER
    stats: dict[str, list[float]]

    def __init__(self, model, *arguments, settings: P3OSettings, **options):
        super().__init__(model, *arguments, **options)
        if self.is_vision_model:
            raise ValueError("OnlineP3OTrainer takes only text")
        self.settings = settings
        expose_head(self.model)
        if self.ref_model is not None:
            expose_head(self.accelerator.unwrap_model(self.ref_model, keep_fp32_wrapper=False))
        names = ("objective/scores", "val/contain_eos_token", *(f"p3o/{name}" for name in METRICS))
        self.stats = {name: [] for name in names}

    def training_step(self, model: nn.Module, inputs: dict, num_items_in_batch: int | None = None) -> Tensor:
        model.train()
        prompts = inputs["prompt"]
        if self.args.use_vllm:
            prompt_ids, prompt_mask, completion_ids, completion_mask = self._generate_vllm(prompts)
        else:
            prompt_ids, prompt_mask, completion_ids, completion_mask, _ = self._generate(model, prompts)
        rewards = self.penalised_rewards(inputs, completion_ids)
        # First responses to all prompts come before all second ones.
        order = torch.arange(2 * len(prompts), device=rewards.device).view(2, -1).T.flatten()
        batch = PaddedBatch(
            torch.cat([prompt_ids, completion_ids], dim=1),
            torch.cat([prompt_mask, completion_mask], dim=1),
            torch.cat([torch.zeros_like(prompt_mask), completion_mask], dim=1),
            2,
            order,
        )
        temperature = self.args.temperature
        # Without a second model the reference is the policy without its adapter.
        adapter_off = self.accelerator.unwrap_model(model).disable_adapter if self.ref_model is None else nullcontext
        with self.accelerator.autocast(), adapter_off():
            reference = padded_logprobs(self.ref_model or model, batch, temperature=temperature)
        pairs = rewards[order].view(-1, 2)
        with self.accelerator.autocast():
            loss, metrics = padded_p3o_loss(
                model, batch, pairs, self.settings, ref_logprobs=reference, temperature=temperature
            )
        self.record({"objective/scores": rewards.mean()} | {f"p3o/{name}": metrics[name] for name in METRICS})
        loss = loss / self.current_gradient_accumulation_steps
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        # LOMO's optimizers take their step within the backward pass.
        lomo = self.args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO)
        self.accelerator.backward(loss, **({"learning_rate": self._get_learning_rate()} if lomo else {}))
        return loss.detach()

    def penalised_rewards(self, inputs: dict, completion_ids: Tensor) -> Tensor:
        """[2 P], first responses before second ones: rewards less the penalty for a missing end-of-sequence."""
        prompts = inputs["prompt"]
        completions = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        if is_conversational({"prompt": prompts[0]}):
            completions = [[{"role": "assistant", "content": completion}] for completion in completions]
        columns = {name: 2 * list(values) for name, values in inputs.items() if name != "prompt"}
        rewards = self._calculate_rewards_from_functions(
            prompts=2 * prompts, completions=completions, completion_ids_list=completion_ids.tolist(), **columns
        )
        ended = torch.isin(completion_ids, torch.tensor(self.eos_token_ids, device=rewards.device)).any(dim=1)
        self.record({"val/contain_eos_token": ended.float().mean()})
        return rewards - (self.args.missing_eos_penalty or 0.0) * ~ended

    def record(self, values: dict[str, Tensor]) -> None:
        means = self.accelerator.reduce(torch.stack(list(values.values())), reduction="mean")
        for name, value in zip(values, means.tolist(), strict=True):
            self.stats[name].append(value)
