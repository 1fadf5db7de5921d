"""What rounding alone does to the clip of whole responses, by their length, on a real model.

python -m benchmarks.rounding_by_length --model MODEL     writes results/rounding_by_length.json

Every weight moves by 1e-6, one step of the first author's rate; responses are cut into windows. The
truth is fp32's. Weights that are rounded and then computed with in fp32 show how much of the noise
is the weights'.
"""

import argparse
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fastp3o.models.loading import load_policy
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.models.tokenizer import load_tokenizer
from fastp3o.packing.pack import Packing, pack
from fastp3o.packing.packed_row import PackedRow

RESULT = Path(__file__).parent / "results" / "rounding_by_length.json"
PROMPT, RESPONSES, LONGEST = "The best way to learn a new language is", 4, 512
LENGTHS, STEP, CLIP_RANGE = (16, 32, 64, 128, 256, 512), 1e-6, 0.2
# Name -> the type that weights are rounded to, and the one that is computed in.
PRECISIONS = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16 weights in fp32": (torch.bfloat16, torch.float32),
    "fp16": (torch.float16, torch.float16),
    "fp16 weights in fp32": (torch.float16, torch.float32),
}


@torch.no_grad()
def sampled_row(name: str) -> PackedRow:
    """Responses of the longest length to one prompt, which go on where the model would end."""
    ids = load_tokenizer(name)(PROMPT, return_tensors="pt")["input_ids"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    settings: dict[str, Any] = {
        "do_sample": True,
        "top_k": 0,
        "min_new_tokens": LONGEST,
        "max_new_tokens": LONGEST,
    }
    out = model.generate(ids.repeat(RESPONSES, 1), **settings)
    (row,) = pack(
        [ids[0].tolist()], [out[:, ids.shape[1] :].tolist()], Packing(tokens_per_row=8192)
    )
    return row


@torch.no_grad()
def log_ratios(policy: PackedModel, moved: PackedModel, row: PackedRow) -> Tensor:
    """Of each token after the step, [RESPONSES, LONGEST] fp64."""
    before, after = (labeled_logprobs(model.eval(), row).double() for model in (policy, moved))
    return (after - before).view(RESPONSES, LONGEST)


def step(name: str) -> PackedModel:
    """The policy after its step, in fp32."""
    model, generator = load_policy(name), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(STEP * torch.randn(parameter.shape, generator=generator).sign())
    return model


def by_length(found: Tensor, truth: Tensor) -> list[dict[str, float]]:
    """Errors of windows' log-ratios, and the share of windows, and of pairs of them, beyond the
    clip range.
    """
    lines = []
    for length in LENGTHS:
        sums, true = (
            values.unflatten(1, (-1, length)).sum(2).flatten() for values in (found, truth)
        )
        pairs = torch.stack([sums[i] - sums[j] for i, j in combinations(range(len(sums)), 2)])
        measured = {
            "error": (sums - true).square().mean().sqrt(),
            "truth": true.square().mean().sqrt(),
            "beyond": (sums.abs() > CLIP_RANGE).double().mean(),
            "pairs_beyond": (pairs.abs() > CLIP_RANGE).double().mean(),
        }
        numbers = {name: float(f"{value:.3g}") for name, value in measured.items()}
        lines.append({"length": length, "windows": len(sums)} | numbers)
    return lines


def described(policy: PackedModel) -> str:
    """A model's kind and size, in the place of a name that may be a folder's."""
    millions = sum(parameter.numel() for parameter in policy.parameters()) / 1e6
    return f"{type(policy.model).__name__} of {millions:.0f} M parameters, on a CPU"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="Folder or hub name of a causal LM.")
    name = parser.parse_args().model
    torch.set_num_threads(1)
    row = sampled_row(name)
    truth_model = load_policy(name)
    result: dict[str, Any] = {
        "model": described(truth_model),
        "step": STEP,
        "clip_range": CLIP_RANGE,
        "responses": RESPONSES,
        "precisions": {},
    }
    truth = log_ratios(truth_model, step(name), row)
    for precision, (weights, computed) in PRECISIONS.items():
        old, new = (model.to(weights).to(computed) for model in (load_policy(name), step(name)))
        found = log_ratios(old, new, row)
        result["precisions"][precision] = by_length(found, truth)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
