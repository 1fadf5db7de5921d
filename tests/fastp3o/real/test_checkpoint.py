"""A real pretrained model beside plain transformers: Gemma 3 270M, with a vocabulary of 262,144,
windows of 512 tokens and a tied head. scripts/test_real.sh makes it; 5 GB of memory and two minutes
of one core.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from fastp3o import P3OConfig, train
from fastp3o.models.loading import load_policy
from fastp3o.models.packed_model import labeled_logprobs
from fastp3o.packing.pack import Packing, pack
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o.rollouts.groups import Prompt, SamplingSettings
from fastp3o_kernels import P3OSettings, linear_p3o_loss
from tests.fastp3o.real.pretrained import MODEL, PAIRS, examples, logprobs, needs_model

pytestmark = needs_model
WINDOW = 512
LONG = " ".join(
    f"In year {year} the town had {year % 97} wells and {year % 13} mills."
    for year in range(1700, 1745)
)


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def test_prompt_and_response_are_the_tokens_of_their_text(tokenizer: PreTrainedTokenizerBase):
    prompts, responses = examples(tokenizer, PAIRS)
    for pair, prompt, ids in zip(PAIRS, prompts, responses, strict=True):
        for name, response in zip(("chosen", "rejected"), ids, strict=True):
            text = pair["prompt"] + pair[name]
            assert (
                tokenizer.decode(prompt[1:] + response[:-1], clean_up_tokenization_spaces=False)
                == text
            )
            if not pair["prompt"].endswith(
                " "
            ):  # else the space would be part of a word of the response
                assert tokenizer(text).input_ids == prompt + response[:-1]


@torch.no_grad()
def test_packed_log_probs_are_those_of_one_response_at_a_time(
    tokenizer: PreTrainedTokenizerBase, plain: PreTrainedModel
):
    """Also beyond the window."""
    longer = [pair | {"prompt": LONG + pair["prompt"]} for pair in PAIRS[:1]]
    prompts, responses = examples(tokenizer, [*PAIRS, *longer])
    assert len(prompts[-1]) > WINDOW
    policy = load_policy(MODEL).eval()
    for row in pack(prompts, responses, Packing(tokens_per_row=8192)):
        got = labeled_logprobs(policy, row)
        expected = [
            logprobs(plain, prompts[group], ids) for group in row.groups for ids in responses[group]
        ]
        torch.testing.assert_close(got, torch.cat(expected), rtol=0, atol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 0.006), (torch.bfloat16, 0.05)])
def test_half_precision_holds_the_residual_stream(
    tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, most: float
):
    """Which reaches 103,795, beyond fp16's maximum. most: root mean square of a token's error, in
    nats.
    """
    prompts, responses = examples(tokenizer, PAIRS)
    (row,) = pack(prompts, responses, Packing(tokens_per_row=8192))
    exact, found = (
        labeled_logprobs(load_policy(MODEL, dtype=one).eval(), row)
        for one in (torch.float32, dtype)
    )
    assert (found - exact).square().mean().sqrt() <= most


@torch.no_grad()
def test_greedy_tokens_are_those_of_generate(
    tokenizer: PreTrainedTokenizerBase, plain: PreTrainedModel
):
    prompts, _ = examples(
        tokenizer, [PAIRS[0], PAIRS[2], PAIRS[0] | {"prompt": LONG + PAIRS[0]["prompt"]}]
    )
    greedy = SamplingSettings(top_k=1)
    sampler = EngineSampler(
        load_policy(MODEL), tokenizer, max_response_tokens=16, batch_size=8, settings=greedy
    )
    groups = sampler([Prompt("", ids, number) for number, ids in enumerate(prompts)], 1, 0)
    for ids, group in zip(prompts, groups, strict=True):
        generated = plain.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)
        assert group.responses[0].ids == generated[0, len(ids) :].tolist()


def test_gradients_are_those_of_fp64(tokenizer: PreTrainedTokenizerBase):
    """P3O's gradient of one pair is a number times ∇log π(y1) − ∇log π(y2). Rounding of the sums of
    log-probs moves the number by its exponential; the vectors are nearer to the true ones than
    that.
    """
    (prompt,), (responses,) = examples(tokenizer, PAIRS[:1])
    moved, kl_coef = torch.tensor([[0.04, -0.03]]), 0.05
    reference, rewards = torch.tensor([[1.0, -0.5]]), torch.tensor([[0.7, -0.4]])

    policy = load_policy(MODEL, trains=True).train()
    (row,) = pack([prompt], [responses], Packing(tokens_per_row=8192))
    with torch.no_grad():
        parts = labeled_logprobs(policy, row).split(row.labeled_lengths)
        now = torch.stack([part.sum() for part in parts]).unsqueeze(0)
    old, ref = now + moved, now + reference

    def loss(hidden: Tensor, head: torch.nn.Module) -> Tensor:
        settings = P3OSettings(kl_coef=kl_coef)
        return linear_p3o_loss(
            hidden, head, row.labels, row.cu_seqlens_on_host, old, ref, rewards, settings
        ).loss

    policy(row, row.labeled_at, loss).backward()
    ours = {
        name.removeprefix("model."): p.grad
        for name, p in policy.named_parameters()
        if p.grad is not None
    }
    del policy

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64).eval()
    with torch.no_grad():
        logps = torch.stack([logprobs(model, prompt, ids).sum() for ids in responses])
    logps.requires_grad_()
    u = (logps - ref.double())[0, 0] - (logps - ref.double())[0, 1]
    u_old = (old - ref).double()[0, 0] - (old - ref).double()[0, 1]
    q = (rewards[0, 0] - rewards[0, 1]).double() - kl_coef * u.detach()
    ratio = (logps - old.double()).sum().exp().detach().clamp(0.1, 10)
    clipped = torch.minimum(torch.maximum(u, u_old - 0.2), u_old + 0.2)
    weights = torch.autograd.grad(torch.maximum(-q * ratio * u, -q * ratio * clipped) / 2, logps)[0]
    for weight, ids in zip(weights, responses, strict=True):
        (weight * logprobs(model, prompt, ids).sum()).backward()
    true = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    assert set(ours) == set(true)
    inner = sum((ours[name].double() * true[name]).sum() for name in true)
    norm = sum(gradient.square().sum() for gradient in true.values())
    scale = inner / norm
    rest = sum((ours[name].double() - scale * true[name]).square().sum() for name in true)
    assert abs(scale - 1) < 5e-3
    assert (rest / norm).sqrt() < 5e-5


def test_an_update_is_saved_as_transformers_reads_it(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
):
    config = P3OConfig(
        model=MODEL,
        output_dir=str(tmp_path / "run"),
        updates=1,
        prompts_per_update=2,
        prompts_per_minibatch=2,
        max_prompt_tokens=32,
        max_response_tokens=8,
        lora_rank=4,
        learning_rate=1e-3,
        tokens_per_row=256,
        report_to="none",
    )

    def vowels(prompts: list[str], responses: list[str]) -> list[float]:
        return [float(sum(letter in "aeiou" for letter in response)) for response in responses]

    result = train(config, prompts=[{"prompt": pair["prompt"]} for pair in PAIRS], reward=vowels)
    (prompt, *_), (responses, *_) = examples(tokenizer, PAIRS)
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "model", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        saved, here = (
            logprobs(model, prompt, responses[0]) for model in (read, result.model.eval())
        )
        before = logprobs(
            AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval(),
            prompt,
            responses[0],
        )
    torch.testing.assert_close(saved, here, rtol=0, atol=1e-5)
    assert (saved - before).abs().max() > 1e-3
