"""Offline objectives on the tiny model: one update of each against its formula, references,
evaluations, resuming.
"""

import gc
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fastp3o.data.loading import load_preferences, load_unpaired_preferences
from fastp3o.errors import UserError
from fastp3o.models import frozen
from fastp3o.models.loading import load_policy
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.reference import SecondModel
from fastp3o.objectives.config.preferences import OFFLINE_OBJECTIVES
from fastp3o.packing.pack import Packing
from fastp3o.runtime.finiteness import NotFiniteError
from fastp3o.runtime.shares import Share
from fastp3o.training import reference_logprobs, supervised
from fastp3o.training.preferences import train, with_other_prompts
from fastp3o.training.reference_logprobs import ReferenceLogprobs, read_logprobs, write_logprobs
from fastp3o_kernels import losses
from tests.fastp3o.evaluation.test_win_rates import save
from tests.fastp3o.models.model_families import logprobs_alone
from tests.fastp3o.runs import metrics, weights, weights_of_start

REWARDS = "rewards_for_tests"
LENGTHS = {"max_prompt_tokens": 32, "max_response_tokens": 16}
# An update that is proportional to small gradients, not to their signs.
ADAM = {"learning_rate": 1e-2, "adam_eps": 1e-2}


def data_file(objective: str) -> str:
    return "unpaired.jsonl" if objective == "kto" else "preferences.jsonl"


def run(objective: str, output_dir: str, model: str, **changes) -> None:
    settings = {
        "train_data": data_file(objective),
        "batch_size": 4,
        "report_to": "none",
        "precision": "fp32",
    }
    settings |= LENGTHS | ADAM
    train(
        OFFLINE_OBJECTIVES[objective](
            **(settings | {"model": model, "output_dir": output_dir} | changes)
        )
    )


@pytest.fixture
def other_model(tiny_model, workplace) -> str:
    """The tiny model, some way off."""
    save(tiny_model, "other", noise=0.05)
    return "other"


# With the defaults of the options. x: log π of chosen and rejected, ref: the same of the reference,
# [1, 2]; n: their tokens.
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "dpo": lambda x, ref, n: losses.dpo(x, ref, beta=0.1),
    "ipo": lambda x, ref, n: losses.ipo(x / n, ref / n, tau=0.1),
    "simpo": lambda x, ref, n: losses.simpo(x / n, beta=2.0, gamma=1.0),
    "orpo": lambda x, ref, n: losses.orpo(x / n, weight=0.1),
    "cpo": lambda x, ref, n: losses.cpo(x, beta=0.1, weight=1.0),
    "slic": lambda x, ref, n: losses.slic(x, delta=1.0, weight=1.0),
    "apo_zero": lambda x, ref, n: losses.apo_zero(x, ref, beta=0.1),
    "apo_down": lambda x, ref, n: losses.apo_down(x, ref, beta=0.1),
    "discopop": lambda x, ref, n: losses.discopop(x, ref, beta=0.05, tau=0.05),
}


def pairs_loss(
    objective: str, policy: nn.Module, reference: nn.Module, tokenizer
) -> tuple[Tensor, Tensor]:
    """The objective's loss, and the negative log-probability of a chosen response's token, means
    over examples.
    """
    examples, _ = load_preferences("preferences.jsonl", tokenizer, **LENGTHS)
    found, nats = [], []
    for example in examples:
        prompt, chosen, rejected = (
            example[f"{name}_ids"] for name in ("prompt", "chosen", "rejected")
        )
        own, other = (
            torch.stack([logprobs_alone(model, prompt, ids).sum() for ids in (chosen, rejected)])[
                None
            ]
            for model in (policy, reference)
        )
        found.append(LOSSES[objective](own, other, torch.tensor([[len(chosen), len(rejected)]])))
        nats.append(-own[0, 0] / len(chosen))
    return torch.stack(found).mean(), torch.stack(nats).mean()


def kto_loss(policy: nn.Module, reference: nn.Module, tokenizer) -> tuple[Tensor, Tensor]:
    examples, _ = load_unpaired_preferences("unpaired.jsonl", tokenizer, **LENGTHS)
    examples = list(examples)

    def log_ratio(prompt: list[int], response: list[int]) -> Tensor:
        own, other = (
            logprobs_alone(model, prompt, response).sum() for model in (policy, reference)
        )
        return own - other.detach()

    # Two responses to each prompt lie together: the last one before them is the second to the
    # prompt before.
    others = [examples[number // 2 * 2 - 1] for number in range(len(examples))]
    mismatched = [
        log_ratio(e["prompt_ids"], o["response_ids"]) for e, o in zip(examples, others, strict=True)
    ]
    z0 = torch.stack(mismatched).mean().detach().clamp(min=0)
    ratios = torch.stack([log_ratio(e["prompt_ids"], e["response_ids"]) for e in examples])
    desirable = torch.tensor([e["desirable"] for e in examples])
    return losses.kto(
        ratios, torch.zeros_like(ratios), desirable, z0, beta=0.1
    ).mean(), torch.zeros(())


@pytest.mark.parametrize(
    ("objective", "sft_coef"),
    [
        *((objective, 0.0) for objective in OFFLINE_OBJECTIVES),
        ("dpo", 0.5),
        ("ipo", 0.5),
        ("simpo", 0.5),
    ],
)
def test_an_update_is_that_of_the_formula(
    objective, sft_coef, workplace, tiny_model, other_model, tokenizer
):
    needs_reference = getattr(OFFLINE_OBJECTIVES[objective], "anchor", "ref") != ""
    named = {"reference": other_model} if needs_reference else {}
    examples = 16 if objective == "kto" else 8
    changes = (
        named
        | {"share_prompts": objective not in ("ipo", "cpo")}
        | ({"sft_coef": sft_coef} if sft_coef else {})
    )
    run(
        objective,
        "run",
        tiny_model,
        batch_size=examples,
        max_grad_norm=1e9,
        tokens_per_row=60,
        **changes,
    )

    policy, reference = (
        AutoModelForCausalLM.from_pretrained(name).double() for name in (tiny_model, other_model)
    )
    loss = kto_loss if objective == "kto" else partial(pairs_loss, objective)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-2, weight_decay=1e-6
    )
    own, nats = loss(policy, reference, tokenizer)
    value = own + sft_coef * nats
    value.backward()
    optimizer.step()
    (line,) = metrics("run")
    assert line["loss"] == pytest.approx(value.item(), rel=1e-5)
    assert line.get("sft_loss", nats.item()) == pytest.approx(nats.item(), rel=1e-5)
    start, moved = weights_of_start(tiny_model), weights("run")
    for name, parameter in policy.named_parameters():
        expected = parameter.detach() - start[name].double()
        assert expected.abs().max() > 1e-5
        difference = moved[name].double() - start[name].double() - expected
        assert difference.abs().max() < 2e-3 * expected.abs().max()


@given(prompts=st.lists(st.integers(0, 2).map(lambda token: [token]), min_size=1))
def test_partners_have_another_prompt(prompts):
    others = with_other_prompts(prompts)
    assert (others is None) == all(prompt == prompts[0] for prompt in prompts)
    assert others is None or all(
        prompts[other] != prompt for other, prompt in zip(others, prompts, strict=True)
    )
    # the nearest before, around the end
    assert with_other_prompts([[1], [2], [2], [3], [1]]) == [
        3,
        0,
        0,
        2,
        3,
    ]


@pytest.mark.parametrize(
    ("objective", "changes"),
    [
        ("dpo", {"lora_rank": 2}),
        ("kto", {"lora_rank": 2}),
        ("kto", {"trainable_layers": 1}),
        ("dpo", {"temperature": 0.5}),
        ("dpo", {"precision": "bf16-autocast"}),
        ("kto", {"precision": "fp16", "gradient_checkpointing": True}),
    ],
    ids=str,
)
def test_what_trains_and_how(objective, changes, workplace, tiny_model):
    run(objective, "run", tiny_model, epochs=4, eval_data=data_file(objective), **changes)
    before, *_, after = metrics("run", "eval.jsonl")
    # The policy is its own reference: every log-ratio is exactly 0, and a tie counts a half.
    assert before["accuracy"] == 0.5
    assert before["k2"] == before["margin"] == before.get("reference_point", 0) == 0
    assert before["loss"] == pytest.approx(math.log(2) if objective == "dpo" else 0.5)
    assert after["accuracy"] > 0.5
    assert after["loss"] < before["loss"]


def policies_in_memory() -> int:
    return sum(type(thing) is PackedModel for thing in gc.get_objects())


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Counts the policies that are loaded, and looks how many more are in memory when a step
    begins.
    """
    gc.collect()
    before = policies_in_memory()  # of an earlier test's thread that hangs
    seen = SimpleNamespace(references=0, more_in_memory=set())
    load, prepared = frozen.load_policy, supervised.SupervisedTask.prepared_rows

    def loads(*arguments, **options) -> PackedModel:
        seen.references += 1
        return load(*arguments, **options)

    def looks(*arguments):
        seen.more_in_memory.add(policies_in_memory() - before)
        return prepared(*arguments)

    monkeypatch.setattr(frozen, "load_policy", loads)
    monkeypatch.setattr(supervised.SupervisedTask, "prepared_rows", looks)
    return seen


def reference_files(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("reference-*.safetensors"))


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_the_reference_is_asked_once_and_is_gone(
    objective, workplace, tiny_model, other_model, loads
):
    data = data_file(objective)
    run(objective, "run", tiny_model, reference=other_model, eval_data=data, eval_limit=3, epochs=2)
    assert loads.references == 1
    assert loads.more_in_memory == {1}
    assert len(reference_files("run")) == 2
    run(
        objective,
        "run",
        tiny_model,
        reference=other_model,
        eval_data=data,
        eval_limit=3,
        epochs=2,
        resume=True,
    )
    assert loads.references == 1


def test_adapters_and_objectives_without_a_reference_load_no_second_model(
    workplace, tiny_model, loads, capsys
):
    run("dpo", "adapters", tiny_model, lora_rank=2)
    for objective in ("simpo", "orpo", "cpo", "slic"):
        run(objective, objective, tiny_model, reference_logprobs="shared")
        assert "--reference_logprobs has no effect without a reference" in capsys.readouterr().out
    assert not Path("shared").exists()
    assert loads.references == 0
    assert reference_files("adapters")


def test_log_probs_of_the_reference_are_found_by_content(
    workplace, tiny_model, other_model, loads, capsys
):
    shared = {"reference_logprobs": "shared", "eval_data": "preferences.jsonl"}
    run("dpo", "first", tiny_model, **shared)
    (file,) = reference_files("shared")  # the same data twice
    run("ipo", "second", tiny_model, lora_rank=2, **shared)
    assert loads.references == 1
    assert f"found in {file}" in capsys.readouterr().out
    others = [{"reference": other_model}, {"limit": 6}, {"precision": "fp16"}, {"temperature": 0.5}]
    for number, changes in enumerate(others):
        run("dpo", str(number), tiny_model, **shared, **changes)
    assert len(reference_files("shared")) == 5


def test_samples_are_evaluated_as_in_the_online_loop(workplace, tiny_model, loads):
    """With several rewards, which ask for columns of the prompts."""
    sampled = {"eval_prompts": "answers.jsonl", "reward": f"{REWARDS}:answered,{REWARDS}:vowels"}
    sampled |= {
        "reward_weights": "1,-2",
        "gold_reward": f"{REWARDS}:varied",
        "max_response_tokens": 8,
    }
    for objective in ("dpo", "simpo"):
        run(objective, objective, tiny_model, epochs=2, eval_data="preferences.jsonl", **sampled)
        before, after = metrics(objective, "eval.jsonl")
        assert before["kl"] == 0 < after["kl_std"]
        assert {
            "reward",
            "reward_std",
            "response_length",
            "missing_eos",
            "accuracy",
            "loss",
        } <= after.keys()
        assert after["reward"] == pytest.approx(
            after["reward/answered"] - 2 * after["reward/vowels"]
        )
        assert after["reward/answered"] == pytest.approx(after["gold"] + 39 / 8)  # the mean answer
    assert loads.more_in_memory == {1}
    run("kto", "kto", tiny_model, eval_prompts="prompts.jsonl", max_response_tokens=8)
    assert metrics("kto", "eval.jsonl")[-1].keys() & {"kl", "reward", "accuracy"} == {"kl"}


TOGETHER, APART = (("first_ids", "second_ids"),), (("first_ids",), ("second_ids",))


@pytest.fixture
def examples() -> Dataset:
    ids = torch.randint(0, 250, (7, 3, 9), generator=torch.Generator().manual_seed(0))
    columns = zip(("prompt_ids", "first_ids", "second_ids"), ids.unbind(1), strict=True)
    return Dataset.from_dict(
        {
            name: [row[: 1 + number].tolist() for number, row in enumerate(rows)]
            for name, rows in columns
        }
    )


@pytest.mark.parametrize("columns", [TOGETHER, APART], ids=["together", "apart"])
@pytest.mark.parametrize("chunk", [2, 1024])
def test_they_are_those_of_each_response_alone(
    tiny_model, examples, columns, chunk, monkeypatch, tmp_path
):
    monkeypatch.setattr(reference_logprobs, "CHUNK", chunk)
    policy = load_policy(tiny_model)
    reference = SecondModel(policy, torch.device("cpu"), offload=False)
    kept = ReferenceLogprobs(Accelerator(cpu=True), Share(), tmp_path, {}, columns, Packing(20), [])
    stops: list[None] = []  # a run that is asked to stop ends after a chunk
    logprobs = kept.compute_one(reference, examples, lambda: stops.append(None))
    assert len(stops) == -(-len(examples) // chunk)
    with torch.no_grad(), policy.with_own_attention() as alone:
        expected = [
            [
                logprobs_alone(alone, e["prompt_ids"], e[name]).sum()
                for name in ("first_ids", "second_ids")
            ]
            for e in examples
        ]
    torch.testing.assert_close(logprobs, torch.tensor(expected), atol=1e-4, rtol=1e-5)


def test_what_is_not_finite_is_not_kept(tiny_model, examples, tmp_path):
    policy = load_policy(tiny_model)
    with torch.no_grad():
        policy.model.model.norm.weight.fill_(torch.nan)
    kept = ReferenceLogprobs(
        Accelerator(cpu=True), Share(), tmp_path, {"data": examples}, TOGETHER, Packing(20), ["m"]
    )
    with pytest.raises(
        NotFiniteError,
        match="a log-probability of the reference is NaN or infinite \\(14 values\\)",
    ):
        kept.compute(SecondModel(policy, torch.device("cpu"), offload=False), list)
    assert not list(tmp_path.iterdir())


def test_a_file_has_what_was_written_and_a_damaged_one_is_refused(tmp_path):
    path, logprobs = tmp_path / "new" / "file", torch.randn(5, 2)
    assert read_logprobs(path) is None
    write_logprobs(path, logprobs)
    assert torch.equal(read_logprobs(path), logprobs)
    for damaged in (path.read_bytes()[:-5], b"{}"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=f"{path} is damaged"):
            read_logprobs(path)
