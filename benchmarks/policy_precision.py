"""How far rounding moves the log-ratios of whole responses, for each precision of the policy.

    PYTHONPATH=.:kernels python benchmarks/policy_precision.py --model runs/x/model --prompts prompts.jsonl

Responses are sampled from the policy, one real AdamW step is taken, and log π_new(y|x) − log π_old(y|x) is compared
with fp64 arithmetic on the same fp32 weights. `ratio/noise` is what the trainer logs for the policy before the step.
Writes results/policy_precision.json, of which report.py makes README's table.
"""

import argparse
import copy
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import plain, precision_table
from fastp3o.config import P3OConfig
from fastp3o.data import load_prompts
from fastp3o.models.loading import load_policy, load_tokenizer
from fastp3o.models.packed_model import PackedModel, scored_logprobs
from fastp3o.objectives.p3o import pairs_loss
from fastp3o.packing.pack import PackedRow, in_groups, pack
from fastp3o.precision import PRECISIONS, Precision, precision_of
from fastp3o.rollouts.transformers_sampler import Rollouts, sampling_mode
from fastp3o.training.minibatches import Pairs
from fastp3o.training.ratio_noise import ratio_noise
from fastp3o_kernels import Head, sequence_logprobs

FOLDER = Path(__file__).parent
LEARNING_RATES = (1e-6, 1e-5, 1e-4)
USUAL = "bf16-autocast, bf16 logits"
Sums = Callable[[PackedModel, PackedRow], Tensor]


@torch.no_grad()
def sums(model: PackedModel, row: PackedRow) -> Tensor:
    """log π(y|x) of each response, [S]."""
    return sequence_logprobs(scored_logprobs(model, row), row.cu_seqlens)


@torch.no_grad()
def sums_from_rounded_logits(model: PackedModel, row: PackedRow) -> Tensor:
    """The same as most trainers compute it: logits are rounded to bf16 before the softmax."""

    def logprobs(hidden: Tensor, head: Head) -> Tensor:
        logits = hidden.bfloat16() @ head.weight.bfloat16().T
        return logits.float().log_softmax(-1).gather(1, row.labels[:, None]).squeeze(1)

    return sequence_logprobs(model(row, row.scored_at, logprobs), row.cu_seqlens)


@contextmanager
def in_precision(model: PackedModel, precision: Precision) -> Iterator[PackedModel]:
    """A copy of an fp32 model as the trainer would run it."""
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(precision.weights)
    device = model.model.device.type
    with torch.autocast(device, torch.bfloat16, enabled=precision.autocast is not None):
        yield rounded


def sampled(policy: PackedModel, prompts: list[list[int]], tokens: int, end: int) -> Rollouts:
    """Two responses of exactly so many tokens to each prompt."""
    width = max(map(len, prompts))
    ids = torch.tensor([[end] * (width - len(prompt)) + prompt for prompt in prompts], device=policy.model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=ids.device)
    torch.manual_seed(0)
    settings = {"do_sample": True, "top_k": 0, "num_return_sequences": 2, "pad_token_id": end, "eos_token_id": end}
    with sampling_mode(policy) as model, torch.no_grad():
        output = model.generate(ids, attention_mask=mask, min_new_tokens=tokens, max_new_tokens=tokens, **settings)
    responses = output[:, width:].tolist()
    repeated = [prompt for prompt in prompts for _ in range(2)]
    texts = [""] * len(responses)
    return Rollouts(repeated, responses, texts, texts, [False] * len(responses))


def after_a_step(policy: PackedModel, row: PackedRow, pairs: Pairs, learning_rate: float) -> PackedModel:
    """The policy after one AdamW step on P3O's loss."""
    moved = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(moved.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    config = P3OConfig(model="", output_dir="", prompts="", reward="", learning_rate=learning_rate)
    pairs_loss(moved, pairs, config).loss.backward()
    optimizer.step()
    return moved


def rms(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item()


def measure(policy: PackedModel, rollouts: Rollouts) -> list[dict]:
    """One record for each precision: the error of log-ratios at each learning rate, and ratio/noise."""
    (row,) = pack(*in_groups(rollouts.prompt_ids, rollouts.response_ids, 2), tokens_per_row=10**9)
    row = row.to(policy.model.device)
    old = sums(policy, row).view(-1, 2)
    rewards = torch.randn(old.shape, generator=torch.Generator().manual_seed(0)).to(old.device)
    pairs = Pairs(row, rewards, old, old, old, old, 1.0)
    exact = sums(copy.deepcopy(policy).double(), row)
    moved = {rate: after_a_step(policy, row, pairs, rate) for rate in LEARNING_RATES}
    truth = {rate: sums(copy.deepcopy(model).double(), row) - exact for rate, model in moved.items()}
    records = [{"precision": "true log-ratio", "errors": {str(rate): rms(truth[rate]) for rate in LEARNING_RATES}}]
    for name in (USUAL, *PRECISIONS[1:]):
        of_rows: Sums = sums_from_rounded_logits if name == USUAL else sums
        precision = precision_of(name.split(",")[0], "fp32")
        with in_precision(policy, precision) as rounded:
            before = of_rows(rounded, row)
            noise = ratio_noise(rounded, rollouts, pairs_with(pairs, before)).item() if name != USUAL else None
        errors = {}
        for rate, model in moved.items():
            with in_precision(model, precision) as rounded:
                errors[str(rate)] = rms(of_rows(rounded, row) - before - truth[rate])
        records.append({"precision": name, "errors": errors, "ratio/noise": noise})
    return records


def pairs_with(pairs: Pairs, logprobs: Tensor) -> Pairs:
    return Pairs(pairs.row, pairs.rewards, logprobs, logprobs, logprobs.view(-1, 2), logprobs.view(-1, 2), 1.0)


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
    rollouts = sampled(policy, list(prompts["prompt_ids"]), arguments.tokens, tokenizer.eos_token_id)
    entropy = -sums(
        policy, pack(*in_groups(rollouts.prompt_ids, rollouts.response_ids, 2), tokens_per_row=10**9)[0].to(device)
    )
    record = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "parameters": policy.model.num_parameters(),
        "nats_per_token": entropy.mean().item() / arguments.tokens,
        "responses": 2 * arguments.pairs,
        "tokens": arguments.tokens,
        "results": measure(policy, rollouts),
    }
    assert all(math.isfinite(error) for result in record["results"] for error in result["errors"].values())
    (FOLDER / "results" / "policy_precision.json").write_text(json.dumps(record, indent=1) + "\n")
    print(plain(precision_table(record)))


if __name__ == "__main__":
    main()
