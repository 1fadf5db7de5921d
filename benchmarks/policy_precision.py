"""Measures how far rounding moves the log-ratios of whole responses, for each precision of the policy.

    python -m benchmarks.policy_precision --model runs/x/model --prompts prompts.jsonl

Responses are sampled from the policy, one real AdamW step is taken, and log π_new(y|x) − log π_old(y|x) is compared
with fp64 arithmetic on the same fp32 weights. `ratio/noise` is what the trainer logs for the policy before the step.
Writes results/policy_precision.json, of which report.py makes the table in fastp3o/training/precision.md.
"""

import argparse
import copy
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import plain, precision_table
from fastp3o.config import PRECISIONS
from fastp3o.data.loading import load_prompts
from fastp3o.models.loading import load_policy, load_tokenizer
from fastp3o.models.packed_model import PackedModel, labelled_logprobs
from fastp3o.objectives.base import Microbatch
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.packing.pack import Packing, pack
from fastp3o.packing.packed_row import PackedRow
from fastp3o.precision import Precision, choose_precision
from fastp3o.rollouts.groups import Group, Prompt, Response, token_ids
from fastp3o.rollouts.transformers_sampler import sampling_mode
from fastp3o.training.logprob_gaps import ratio_noise
from fastp3o_kernels import Head, sequence_logprobs

FOLDER = Path(__file__).parent
LEARNING_RATES = (1e-6, 1e-5, 1e-4)
USUAL = "bf16-autocast, bf16 logits"
Sums = Callable[[PackedModel, PackedRow], Tensor]


@torch.no_grad()
def sums(model: PackedModel, row: PackedRow) -> Tensor:
    """log π(y|x) of each response, [S]."""
    return sequence_logprobs(labelled_logprobs(model, row), row.cu_seqlens)


@torch.no_grad()
def sums_from_rounded_logits(model: PackedModel, row: PackedRow) -> Tensor:
    """The same as most trainers compute it: logits are rounded to bf16 before the softmax."""

    def logprobs(hidden: Tensor, head: Head) -> Tensor:
        logits = hidden.bfloat16() @ head.weight.bfloat16().T
        return logits.float().log_softmax(-1).gather(1, row.labels[:, None]).squeeze(1)

    return sequence_logprobs(model(row, row.labelled_at, logprobs), row.cu_seqlens)


@contextmanager
def in_precision(model: PackedModel, precision: Precision) -> Iterator[PackedModel]:
    """A copy of an fp32 model as the trainer would run it."""
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(precision.weights)
    device = model.model.device.type
    with torch.autocast(device, torch.bfloat16, enabled=precision.autocast is not None):
        yield rounded


def sampled(policy: PackedModel, prompts: list[list[int]], tokens: int, end: int) -> list[Group]:
    """Two responses of exactly this many tokens to each prompt."""
    width = max(map(len, prompts))
    ids = torch.tensor([[end] * (width - len(prompt)) + prompt for prompt in prompts], device=policy.model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=ids.device)
    torch.manual_seed(0)
    settings = {"do_sample": True, "top_k": 0, "num_return_sequences": 2, "pad_token_id": end, "eos_token_id": end}
    with sampling_mode(policy) as model, torch.no_grad():
        output = model.generate(ids, attention_mask=mask, min_new_tokens=tokens, max_new_tokens=tokens, **settings)
    responses = output[:, width:].view(len(prompts), 2, tokens).tolist()
    return [
        Group(Prompt("", prompt), [Response(own, "", False) for own in group])
        for prompt, group in zip(prompts, responses, strict=True)
    ]


def after_a_step(policy: PackedModel, microbatch: Microbatch, learning_rate: float) -> PackedModel:
    """The policy after one AdamW step on P3O's loss."""
    moved = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(moved.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    config = P3OConfig(model="", output_dir="", prompts="", reward="", learning_rate=learning_rate)
    config.build().loss(moved, microbatch, len(microbatch.rewards))[0].backward()
    optimizer.step()
    return moved


def rms(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item()


def measure(policy: PackedModel, groups: list[Group]) -> list[dict]:
    """One record for each precision: the error of log-ratios at each learning rate, and ratio/noise."""
    row = single_row(groups).to(policy.model.device)
    old = sums(policy, row).view(-1, 2)
    rewards = torch.randn(old.shape, generator=torch.Generator().manual_seed(0)).to(old.device)
    microbatch = Microbatch(row, rewards, old, old, old, old)
    exact = sums(copy.deepcopy(policy).double(), row)
    moved = {rate: after_a_step(policy, microbatch, rate) for rate in LEARNING_RATES}
    truth = {rate: sums(copy.deepcopy(model).double(), row) - exact for rate, model in moved.items()}
    records = [{"precision": "true log-ratio", "errors": {str(rate): rms(truth[rate]) for rate in LEARNING_RATES}}]
    for name in (USUAL, *PRECISIONS[1:]):
        sums_in_precision: Sums = sums_from_rounded_logits if name == USUAL else sums
        precision = choose_precision(name.split(",")[0], "fp32")
        with in_precision(policy, precision) as rounded:
            before = sums_in_precision(rounded, row)
            given = replace(microbatch, old_logprobs=before.view(-1, 2))
            noise = ratio_noise(rounded, groups, given).item() if name != USUAL else None
        errors = {}
        for rate, model in moved.items():
            with in_precision(model, precision) as rounded:
                errors[str(rate)] = rms(sums_in_precision(rounded, row) - before - truth[rate])
        records.append({"precision": name, "errors": errors, "ratio/noise": noise})
    return records


def single_row(groups: list[Group]) -> PackedRow:
    (row,) = pack(*token_ids(groups), Packing(tokens_per_row=10**9))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(arguments.model)
    prompts, _ = load_prompts(arguments.prompts, tokenizer, split="train", limit=arguments.pairs, max_prompt_tokens=192)
    policy = load_policy(arguments.model, device=device).eval()
    groups = sampled(policy, list(prompts["prompt_ids"]), arguments.tokens, tokenizer.eos_token_id)
    entropy = -sums(policy, single_row(groups).to(device))
    record = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "parameters": policy.model.num_parameters(),
        "nats_per_token": entropy.mean().item() / arguments.tokens,
        "responses": 2 * arguments.pairs,
        "tokens": arguments.tokens,
        "results": measure(policy, groups),
    }
    assert all(math.isfinite(error) for result in record["results"] for error in result["errors"].values())
    (FOLDER / "results" / "policy_precision.json").write_text(json.dumps(record, indent=1) + "\n")
    print(plain(precision_table(record)))


if __name__ == "__main__":
    main()
