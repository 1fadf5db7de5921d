from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset

from fastp3o.evaluation.evaluate import Evaluation
from fastp3o.models.loading import load_policy
from fastp3o.models.reference import SecondModel
from fastp3o.packing.pack import Packing
from fastp3o.rollouts.groups import finished, lengths
from fastp3o.rollouts.transformers_sampler import TransformersSampler
from tests.fastp3o.models.model_families import logprobs_alone

K = 3


def test_the_kl_is_the_mean_log_ratio_of_the_same_samples_and_all_are_means_over_prompts(
    tiny_model, tokenizer
):
    """The policy has moved away from its reference; one reward is the response's length."""
    policy, sampled = load_policy(tiny_model), []
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    prompts = ["Say tree:", "Say a:", "Say the cloud:"]
    evaluation = Evaluation(
        accelerator=Accelerator(cpu=True),
        policy=policy,
        reference=SecondModel(load_policy(tiny_model), torch.device("cpu"), offload=False),
        sampler=TransformersSampler(policy, tokenizer, max_response_tokens=5, batch_size=2),
        rewards={"reward": lengths},
        prompts=Dataset.from_dict({"prompt": prompts, "prompt_ids": tokenizer(prompts).input_ids}),
        packing=Packing(40),
        responses_per_prompt=K,
        seed=3,
    )

    def recording(*request):
        sampled.append(evaluation.sampler(*request))
        return sampled[-1]

    metrics = replace(evaluation, sampler=recording)()
    (groups,) = sampled
    assert lengths(groups).shape == (3, K)

    def logprobs(model) -> torch.Tensor:
        with torch.no_grad(), model.with_own_attention() as alone:
            pairs = [
                (group.prompt.ids, response.ids) for group in groups for response in group.responses
            ]
            sums = [logprobs_alone(alone, *pair).sum() for pair in pairs]
        return torch.stack(sums).view(-1, K)

    prompt_means = (logprobs(policy) - logprobs(evaluation.reference.model)).mean(dim=1)
    assert metrics["kl"] == pytest.approx(prompt_means.mean().item(), abs=1e-5)
    assert metrics["kl_std"] == pytest.approx(prompt_means.std().item(), abs=1e-5)
    assert metrics["kl"] != 0
    assert metrics["reward"] == metrics["response_length"] == lengths(groups).mean().item()
    assert metrics["reward_std"] == pytest.approx(lengths(groups).mean(dim=1).std().item())
    assert metrics["missing_eos"] == 1 - finished(groups).float().mean().item()
    assert metrics["prompts"] == 3
    assert evaluation() == metrics
