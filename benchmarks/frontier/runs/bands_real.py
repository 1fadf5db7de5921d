"""How far a step moves responses of a real model by their length, and what each band clips of it: a
line of bands_real.jsonl for each size of step that it lacks.

python -m benchmarks.frontier.runs.bands_real --model .real/gemma

12 continuations of 128 tokens are sampled, and get rewards by chance. One step of joint P3O's gradient
at the old policy moves all weights by the learning rate, as Adam's first step does. Log-ratios of the
first 16, 32, 64 and 128 tokens, plain PyTorch in fp32, are the record; bands are applied to them by
`report.bands`. No update is made beyond the first.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.frontier.runs.records import add_line, lines_of
from benchmarks.frontier.tasks.task import RESULTS
from fastp3o.models.loading import load_policy
from fastp3o.models.tokenizer import load_tokenizer
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o.rollouts.groups import Group, Prompt

RECORD = RESULTS / "bands_real.jsonl"
PROMPTS = (
    "The history of bread begins",
    "To plant a tree in your garden, you should",
    "Dear colleagues, after a long discussion we",
)
RESPONSES, TOKENS = 4, 128
LENGTHS = (16, 32, 64, 128)
STEPS = (1e-8, 1e-7, 1e-6, 1e-5)  # learning rates
EPSILON = 1e-8  # of Adam


def sampled(model: str) -> list[Group]:
    tokenizer = load_tokenizer(model)
    prompts = [Prompt(text, tokenizer(text).input_ids, n) for n, text in enumerate(PROMPTS)]
    policy = load_policy(model).eval()
    sampler = EngineSampler(policy, tokenizer, max_response_tokens=TOKENS, batch_size=64)
    return sampler(prompts, RESPONSES, 0)


def token_logprobs(model: PreTrainedModel, prompt: list[int], response: list[int]) -> Tensor:
    """[n] of the response's tokens."""
    hidden = model.base_model(input_ids=torch.tensor([prompt + response])).last_hidden_state[0]
    logits = model.get_output_embeddings()(hidden[len(prompt) - 1 : -1]).float()
    labels = torch.tensor(response)
    return logits.gather(1, labels[:, None])[:, 0] - logits.logsumexp(1)


@torch.no_grad()
def sums(model: PreTrainedModel, groups: list[Group]) -> Tensor:
    """[responses, LENGTHS]: log-probabilities of beginnings, fp64."""
    rows = []
    for group in groups:
        for response in group.responses:
            tokens = token_logprobs(model, group.prompt.ids, response.ids).double()
            rows.append(torch.stack([tokens[:length].sum() for length in LENGTHS]))
    return torch.stack(rows)


def gradient_step(model: PreTrainedModel, groups: list[Group], rewards: Tensor) -> list[Tensor]:
    """What Adam's first step adds to each weight at a learning rate of 1. At the old policy joint
    P3O's gradient is that of −(r − mean) log π, up to a factor.
    """
    advantages = rewards - rewards.mean(1, keepdim=True)
    for group, of_group in zip(groups, advantages, strict=True):
        for response, advantage in zip(group.responses, of_group.tolist(), strict=True):
            logprob = token_logprobs(model, group.prompt.ids, response.ids).sum()
            (-advantage * logprob / rewards.numel()).backward()
    steps = []
    for weight in model.parameters():
        assert weight.grad is not None
        steps.append(-weight.grad / (weight.grad.abs() + EPSILON))
        weight.grad = None
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=".real/gemma", help="Folder of a model.")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    missing = [step for step in STEPS if step not in {line["step"] for line in lines_of(RECORD)}]
    if not missing:
        return
    began = time.process_time()
    groups = sampled(asked.model)
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32).eval()
    rewards = torch.randn(len(PROMPTS), RESPONSES, generator=torch.Generator().manual_seed(0))
    before, steps = sums(model, groups), gradient_step(model, groups, rewards)
    moved = 0.0
    for step in sorted(missing):
        with torch.no_grad():
            for weight, one in zip(model.parameters(), steps, strict=True):
                weight.add_(one, alpha=step - moved)
        moved = step
        log_ratios = sums(model, groups) - before
        line = {
            "model": Path(asked.model).name,
            "step": step,
            "lengths": [len(one.ids) for group in groups for one in group.responses],
            "rewards": [[float(f"{value:.6g}") for value in row] for row in rewards.tolist()],
            "log_ratios": [[float(f"{value:.5g}") for value in row] for row in log_ratios.tolist()],
            "seconds": round(time.process_time() - began, 1),
        }
        add_line(RECORD, line)


if __name__ == "__main__":
    main()
