"""P3O (Pairwise Proximal Policy Optimization, arXiv 2310.00212) in one file: sampling, log-probs,
loss, steps.

    python scripts/examples/p3o_in_one_file.py --model Qwen/Qwen3-0.6B-Base --prompts prompts.jsonl --reward my:function

This is the algorithm for reading and for forking, on one GPU or CPU: transformers samples with
`generate`, batches are padded, and `fastp3o_kernels` computes the loss from hidden states, so that
no logits of all tokens are ever kept. It takes the steps of `fastp3o p3o --sampler transformers
--precision fp32`, whose numbers it gives.

What the trainer has beyond it: packed rows that hold each prompt once, an engine for sampling, half
precision with fp32 masters, several GPUs, resumption, evaluations, servers, turns of tools, further
objectives.

    prompts.jsonl   a record a line with the text of a prompt: {"prompt": "..."}
    my:function     function(prompts, responses) -> a number for each response, from the module my.py

P prompts an update, K responses to each, B = P K rows of a batch, T tokens in the longest of them.
"""

import argparse
import copy
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fastp3o_kernels import (
    P3OSettings,
    expose_head,
    linear_logprobs,
    linear_p3o_loss,
    response_tokens,
)
from fastp3o_kernels import sequence_logprobs as sum_by_response

Reward = Callable[[list[str], list[str]], list[float]]


@dataclass(frozen=True)
class Options:
    """The options of a run; each is a flag of the command line, and explained here."""

    model: str  # a hub name or a folder
    prompts: str  # a JSON Lines file
    reward: str  # module:function
    output_dir: str = "runs/p3o_in_one_file"

    # Sampling.
    updates: int = 100  # rounds of sampling and training
    prompts_per_update: int = 16  # P
    responses_per_prompt: int = 4  # K; the paper has 2
    max_prompt_tokens: int = 512  # longer prompts lose their beginning
    max_response_tokens: int = 128  # longer responses are cut

    # Steps.
    inner_epochs: int = 4  # optimizer steps on the responses of an update
    rows_per_pass: int = 0  # responses in a forward and backward pass, a multiple of K; 0: all
    learning_rate: float = 1e-6
    max_grad_norm: float = 1.0

    # The loss: see `fastp3o_kernels.P3OSettings`.
    clip_range: float = 0.2  # epsilon
    kl_coef: float = 0.05  # beta, the weight of the KL to the reference
    reward_clip: float = 10.0  # the largest difference of two scaled rewards

    seed: int = 0


class Batch(NamedTuple):
    """Responses behind their prompts, the K of a prompt one after the other, padded on the right."""

    input_ids: Tensor  # [B, T] int64
    attention_mask: Tensor  # [B, T], 1 at tokens
    response_mask: Tensor  # [B, T], 1 at the responses' tokens, end-of-sequence included

    def part(self, first: int, last: int) -> "Batch":
        return Batch(*(tensor[first:last] for tensor in self))

    def to_device(self, device: str) -> "Batch":
        return Batch(*(tensor.to(device) for tensor in self))


def main() -> None:
    options = parse_options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    policy = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, device_map=device
    )
    prompts, reward = load_prompts(options, tokenizer), load_function(options.reward)

    # The reference is the policy as it is now. `expose_head` makes model(..., head_loss=f) return
    # f(hidden, head).
    policy = expose_head(policy)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=options.learning_rate,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=1e-6,
    )
    settings = P3OSettings(clip_range=options.clip_range, kl_coef=options.kl_coef)
    scaler = DifferenceScaler(options.reward_clip)
    folder = Path(options.output_dir)
    folder.mkdir(parents=True, exist_ok=True)

    for update in range(1, options.updates + 1):
        began = time.perf_counter()

        # 1. Rollouts: K responses to each of P prompts, from the policy as it is now.
        chosen = [prompts[index] for index in indices_of_update(update, len(prompts), options)]
        torch.manual_seed(derived_seed(options.seed, update))
        responses = sample(policy, tokenizer, [ids for _, ids in chosen], options)

        # 2. Rewards, [P, K]: only their differences within a prompt will matter.
        texts = texts_behind(tokenizer, [ids for _, ids in chosen], responses)
        repeated = [text for text, _ in chosen for _ in range(options.responses_per_prompt)]
        rewards = torch.tensor(reward(repeated, texts), dtype=torch.float32).view(len(chosen), -1)
        scaled = scaler(rewards).to(device)

        # 3. log π_old and log π_ref of whole responses, [P, K], before anything moves.
        batch = make_batch(
            [ids for _, ids in chosen], responses, tokenizer.pad_token_id, options
        ).to_device(device)
        old_logprobs = response_logprobs(policy, batch, options)
        ref_logprobs = response_logprobs(reference, batch, options)

        # 4. Steps: the clipped loss of all pairs of responses to a prompt, and its gradient.
        steps = []
        for _ in range(options.inner_epochs):
            metrics = add_gradients(
                policy, batch, old_logprobs, ref_logprobs, scaled, settings, options
            )
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), options.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            steps.append(metrics | {"grad_norm": norm.item()})

        line = {"step": update, "reward": rewards.mean().item()}
        line |= {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
        line |= {"ratio_max": max(step["ratio_max"] for step in steps)}
        # nats per response, of the policy that sampled
        line |= {"kl": (old_logprobs - ref_logprobs).mean().item()}
        line |= {"seconds": time.perf_counter() - began}
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(" ".join(f"{name} {value:.4g}" for name, value in line.items()), flush=True)

    policy.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


# ---- rollouts


@torch.no_grad()
def sample(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    options: Options,
) -> list[list[int]]:
    """K responses to each prompt, adjacent, with their end-of-sequence: samples of the policy
    itself, which P3O's ratios and KL are about. So temperature is 1, and whatever settings came
    with the checkpoint are hidden.
    """
    longest = max(map(len, prompts))
    pad, ends = tokenizer.pad_token_id, end_ids(policy, tokenizer)
    input_ids = [[pad] * (longest - len(ids)) + ids for ids in prompts]  # padded on the left
    attention_mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    of_checkpoint, policy.generation_config = policy.generation_config, GenerationConfig()
    policy.eval()
    with autocast(policy):
        output = cast(Any, policy).generate(
            input_ids=torch.tensor(input_ids, device=policy.device),
            attention_mask=torch.tensor(attention_mask, device=policy.device),
            generation_config=GenerationConfig(
                do_sample=True,
                top_k=0,
                num_return_sequences=options.responses_per_prompt,
                max_new_tokens=options.max_response_tokens,
                eos_token_id=ends,
                pad_token_id=pad,
            ),
        )
    policy.train()
    policy.generation_config = of_checkpoint
    return [until_end(ids, ends) for ids in output[:, longest:].tolist()]


def end_ids(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a response: those of the checkpoint, and the tokenizer's."""
    ends = policy.generation_config.eos_token_id
    of_checkpoint = ends if isinstance(ends, list) else [ends]
    return sorted({end for end in (*of_checkpoint, tokenizer.eos_token_id) if end is not None})


def until_end(ids: list[int], ends: list[int]) -> list[int]:
    """The ids up to the first end-of-sequence, which is a token like others: the policy learns to
    end.
    """
    length = next((place + 1 for place, token in enumerate(ids) if token in ends), len(ids))
    return ids[:length]


def texts_behind(
    tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], responses: list[list[int]]
) -> list[str]:
    """The texts of responses. Decoded alone, some tokenizers drop the space that they begin with."""
    K = len(responses) // len(prompts)
    texts = []
    for number, response in enumerate(responses):
        prompt = prompts[number // K]
        before = cast(str, tokenizer.decode(prompt, skip_special_tokens=True))
        both = cast(str, tokenizer.decode(prompt + response, skip_special_tokens=True))
        texts.append(both[len(before) :])
    return texts


# ---- rewards


class DifferenceScaler:
    """Divides rewards by the deviation of all differences within prompts so far: a reward that is
    shifted for all responses to a prompt stays the same. clip: the largest difference that comes
    out.

    Responses are exchangeable, so the mean difference is 0 and the deviation is the root mean
    square. The trainer's also bounds what a single outlier adds to the deviation.
    """

    def __init__(self, clip: float):
        self.clip, self.count, self.sum_of_squares = clip, 0, 0.0

    def __call__(self, rewards: Tensor) -> Tensor:
        """[P, K] -> [P, K], as distances from the prompt's mean."""
        i, j = torch.triu_indices(rewards.shape[1], rewards.shape[1], offset=1)
        differences = (rewards[:, i] - rewards[:, j]).double()
        self.count += differences.numel()
        self.sum_of_squares += differences.square().sum().item()
        deviation = (self.sum_of_squares / self.count) ** 0.5 or 1.0
        centred = rewards - rewards.mean(dim=1, keepdim=True)
        return (centred / deviation).clamp(-self.clip / 2, self.clip / 2)


# ---- log-probs and loss


def make_batch(
    prompts: list[list[int]], responses: list[list[int]], pad: int, options: Options
) -> Batch:
    """Each response behind its prompt. responses: the K of a prompt adjacent."""
    of_each = [prompt for prompt in prompts for _ in range(options.responses_per_prompt)]
    width = max(
        len(prompt) + len(response) for prompt, response in zip(of_each, responses, strict=True)
    )
    input_ids = torch.full((len(responses), width), pad)
    attention_mask, response_mask = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
    for row, (prompt, response) in enumerate(zip(of_each, responses, strict=True)):
        end = len(prompt) + len(response)
        input_ids[row, :end] = torch.tensor(prompt + response)
        attention_mask[row, :end] = 1
        response_mask[row, len(prompt) : end] = 1
    return Batch(input_ids, attention_mask, response_mask)


def passes(batch: Batch, options: Options) -> Iterator[tuple[slice, Batch]]:
    """The parts of a batch that go through the model at once, and their prompts. Pairs stay
    together.
    """
    K = options.responses_per_prompt
    prompts_per_pass = (options.rows_per_pass or len(batch.input_ids)) // K
    for first in range(0, len(batch.input_ids) // K, prompts_per_pass):
        last = first + prompts_per_pass
        yield slice(first, last), batch.part(first * K, last * K)


@torch.no_grad()
def response_logprobs(model: PreTrainedModel, batch: Batch, options: Options) -> Tensor:
    """log π of whole responses in nats, [P, K]: sums over their tokens."""
    K, parts = options.responses_per_prompt, []
    for _, part in passes(batch, options):
        tokens = response_tokens(part.input_ids, part.response_mask, responses_per_prompt=K)
        with autocast(model):
            logprobs = model(
                input_ids=part.input_ids,
                attention_mask=part.attention_mask,
                use_cache=False,
                head_loss=lambda hidden, head, tokens=tokens: linear_logprobs(
                    hidden.flatten(0, 1)[tokens.predicted_at],
                    head,
                    tokens.labels,
                    cu_seqlens=tokens.cu_seqlens,
                    responses_per_prompt=K,
                ),
            )
        parts.append(sum_by_response(logprobs, tokens.cu_seqlens.to(logprobs.device)).view(-1, K))
    return torch.cat(parts)


def add_gradients(
    policy: PreTrainedModel,
    batch: Batch,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    rewards: Tensor,
    settings: P3OSettings,
    options: Options,
) -> dict[str, float]:
    """Adds the gradient of the loss, a mean over prompts, to the weights'. Returns the loss and its
    metrics.

    For two responses to a prompt, with u the difference of their log π / π_ref, ρ = π / π_old of
    each, and q the difference of their rewards less beta times u (a constant), the joint loss
    (P3O-V2) is

        max(-q c u, -q c clip(u, u_old ± epsilon)) / 2     where c = ρ₁ ρ₂, a constant within 1/10 and 10

    and the mean is over the pairs of a prompt: `p3o_loss` of `fastp3o_kernels` from log-probs, the
    same with its gradient straight from hidden states here.
    """
    loss, sums, counts = 0.0, dict[str, Tensor](), dict[str, Tensor]()
    largest_ratio = 0.0
    for prompts, part in passes(batch, options):
        tokens = response_tokens(
            part.input_ids, part.response_mask, responses_per_prompt=options.responses_per_prompt
        )
        with autocast(policy):
            output = policy(
                input_ids=part.input_ids,
                attention_mask=part.attention_mask,
                use_cache=False,
                head_loss=lambda hidden, head, prompts=prompts, tokens=tokens: linear_p3o_loss(
                    hidden.flatten(0, 1)[tokens.predicted_at],
                    head,
                    tokens.labels,
                    tokens.cu_seqlens,
                    old_logprobs[prompts],
                    ref_logprobs[prompts],
                    rewards[prompts],
                    settings,
                    divisor=float(len(rewards)),
                ),
            )
        output.loss.backward()
        loss += output.loss.item()
        largest_ratio = max(largest_ratio, output.metrics["ratio_max"].item())
        for name, count in output.counts.items():
            sums[name] = sums.get(name, 0.0) + output.metrics[name] * count
            counts[name] = counts.get(name, 0.0) + count
    means = {name: (sums[name] / counts[name].clamp(min=1)).item() for name in sums}
    return {"loss": loss, **means, "ratio_max": largest_ratio}


def autocast(model: PreTrainedModel) -> AbstractContextManager:
    """bf16 products on a GPU; weights and log-probs stay fp32. A CPU computes in fp32."""
    return torch.autocast("cuda", torch.bfloat16) if model.device.type == "cuda" else nullcontext()


# ---- data, seeds, options


def load_prompts(
    options: Options, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[str, list[int]]]:
    """The texts of prompts and their ids, the last `max_prompt_tokens` of them."""
    prompts = []
    for number, line in enumerate(Path(options.prompts).read_text().splitlines(), start=1):
        record = json.loads(line)
        if not isinstance(record.get("prompt"), str) or not record["prompt"]:
            raise SystemExit(
                f"{options.prompts}, line {number}: expected a text under 'prompt', got {line[:80]}"
            )
        prompts.append(
            (record["prompt"], tokenizer(record["prompt"]).input_ids[-options.max_prompt_tokens :])
        )
    return prompts


def load_function(name: str) -> Reward:
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    return cast(Reward, getattr(importlib.import_module(module), function))


def derived_seed(*parts: int) -> int:
    """A seed of its own for each update and each pass."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def indices_of_update(update: int, total: int, options: Options) -> list[int]:
    """The prompts of an update, in an endless sequence of passes, each in its own random order."""
    P, chosen = options.prompts_per_update, []
    for place in range((update - 1) * P, update * P):
        generator = torch.Generator().manual_seed(derived_seed(options.seed, place // total))
        chosen.append(int(torch.randperm(total, generator=generator)[place % total]))
    return chosen


def parse_options() -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, field in Options.__dataclass_fields__.items():
        required = field.default is MISSING
        parser.add_argument(
            f"--{name}", type=cast(type, field.type), required=required, default=field.default
        )
    options = Options(**vars(parser.parse_args()))
    if options.responses_per_prompt < 2:
        parser.error(
            f"--responses_per_prompt must be at least 2, got {options.responses_per_prompt}: P3O compares them"
        )
    if options.rows_per_pass % options.responses_per_prompt:
        parser.error(
            "--rows_per_pass must be a multiple of --responses_per_prompt: pairs stay together"
        )
    return options


if __name__ == "__main__":
    main()
