"""Runs whose models fp16 does not hold: --precision auto takes another, a named fp16 is refused,
and what grows beyond it in the middle of a run is told by its place.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from fastp3o import train
from fastp3o.evaluation import win_rates
from fastp3o.evaluation.config import EvaluateConfig
from fastp3o.generate import loop as generating
from fastp3o.generate.loop import generate
from fastp3o.models.loading import load_policy
from fastp3o.models.packable import trial_overflow
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.reference import SecondModel
from fastp3o.optimizer.optimizer import Optimizer
from fastp3o.packing.pack import Packing
from fastp3o.rewards.model import ModelReward
from fastp3o.runtime import precision
from fastp3o.runtime.finiteness import NotFiniteError
from fastp3o.runtime.precision import named_precision, wider_precision
from fastp3o.runtime.shares import Share
from fastp3o.training import setup
from fastp3o.training.reference_logprobs import ReferenceLogprobs
from tests.fastp3o.generate import test_generate
from tests.fastp3o.models.model_families import enlarge, with_large_stream
from tests.fastp3o.runs import assert_equal, assert_resumes, config, metrics, weights
from tests.fastp3o.together import together

PLACE = r"(what enters )?model\.layers\.\d[\w.]*"
REACHES = PLACE + r" reaches \d+,\d+, and fp16's maximum is 65,504"
RUNS = Path(__file__).with_name("runs_with_automatic_fp16.py")


@pytest.fixture
def models(workplace: Path, tiny_model: str) -> dict[str, str]:
    """The tiny model, policies whose streams go beyond fp16 and near to its end, and a reward model
    beyond it.
    """
    for name in ("beyond", "near", "judge"):
        kind = AutoModelForSequenceClassification if name == "judge" else AutoModelForCausalLM
        model = kind.from_pretrained(tiny_model, **({"num_labels": 1} if name == "judge" else {}))
        torch.manual_seed(0)
        enlarge(model)
        with_large_stream(model, 400_000.0, token=10)  # the first one that a trial has
        if name == "near":
            found = trial_overflow(PackedModel(copy.deepcopy(model)))
            with_large_stream(model, 400_000.0 * 45_000.0 / found.value, token=10)
        model.save_pretrained(name)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(name)
    return {name: name for name in ("beyond", "near", "judge")} | {"plain": tiny_model}


@pytest.fixture
def automatic_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """--precision auto is fp16, as on a GPU."""
    for module in (setup, generating, win_rates):
        choose: Callable = module.choose_precision

        def chosen(name: str, automatic: str, choose: Callable = choose) -> precision.Precision:
            return (
                named_precision("fp16")._replace(automatic=True)
                if name == "auto"
                else choose(name, automatic)
            )

        monkeypatch.setattr(module, "choose_precision", chosen)


@pytest.mark.parametrize("native", [True, False], ids=["bf16", "no bf16"])
def test_auto_leaves_fp16_for_what_holds_and_the_run_is_one_that_names_it(
    models, automatic_fp16, native, monkeypatch, capsys
):
    monkeypatch.setattr(precision, "multiplies", lambda _: native)
    taken = "bf16-autocast" if native else "fp32"
    run = config(models["beyond"], "run", precision="auto", updates=2, save_every=1)
    train(run)
    said = capsys.readouterr().out
    assert said.count(f"--precision auto: beyond in {taken}, since in a trial ") == 1
    assert f"the CPU, {taken}\n" in said
    assert f"in precision {taken}" in Path("run/model/README.md").read_text()
    train(config(models["beyond"], "named", precision=taken, updates=2, save_every=1))
    assert metrics("run") == metrics("named")
    assert_equal(weights("run"), weights("named"))
    if native:
        assert_resumes(run)


def test_fp16_by_name_is_refused_where_it_does_not_hold_and_warned_of_where_it_may_not(
    models, automatic_fp16, capsys
):
    taken = wider_precision(trains=True).name
    with pytest.raises(
        ValueError, match=f"beyond overflows fp16: {REACHES}: use --precision {taken}"
    ):
        train(config(models["beyond"], "refused", precision="fp16"))
    assert not Path("refused").exists()
    once = {"updates": 1, "inner_epochs": 1, "prompts_per_minibatch": 8}
    train(config(models["near"], "warned", precision="fp16", **once))
    assert "warning: near may overflow fp16: " in capsys.readouterr().out
    train(config(models["near"], "auto", precision="auto", **once))
    assert f"--precision auto: near in {taken}" in capsys.readouterr().out
    train(config(models["plain"], "plain", precision="auto", **once))
    assert "in a trial" not in capsys.readouterr().out
    assert "loss_scale" in metrics("plain")[0]


def test_what_does_not_train_gets_what_holds_it_alone(models, automatic_fp16, capsys):
    taken = wider_precision(trains=False).name
    once = {"updates": 1, "inner_epochs": 1, "prompts_per_minibatch": 8, "reward": "judge"}
    train(config(models["plain"], "run", precision="auto", **once))
    assert f"--precision auto: judge in {taken}, since" in capsys.readouterr().out
    assert "loss_scale" in metrics("run")[0]  # the policy is in fp16
    with pytest.raises(
        ValueError, match=f"judge overflows fp16: {REACHES}: --precision auto loads"
    ):
        train(config(models["plain"], "refused", precision="fp16", **once))
    generate(test_generate.config(models["beyond"], "generated"))
    assert f"--precision auto: beyond in {taken}, since" in capsys.readouterr().out
    settings = EvaluateConfig(
        model=models["beyond"], prompts="prompts.jsonl", reward="judge", max_response_tokens=4
    )
    tokenizer = AutoTokenizer.from_pretrained(models["beyond"])
    responses = win_rates.respond(
        settings.model, tokenizer, win_rates.prompts_for(tokenizer, settings), settings
    )
    assert responses.rewards["judge"].isfinite().all()
    said = capsys.readouterr().out
    assert all(
        f"--precision auto: {name} in {taken}, since" in said for name in ("beyond", "judge")
    )


def test_two_processes_take_the_same(models):
    flags = [
        *(
            "--prompts",
            "prompts.jsonl",
            "--updates",
            "1",
            "--prompts_per_update",
            "8",
            "--max_response_tokens",
            "6",
        )
    ]
    flags += [
        "--prompts_per_minibatch",
        "4",
        "--report_to",
        "none",
        "--samples_every",
        "0",
        "--reward",
        "judge",
    ]
    done = together(
        RUNS, "p3o", *flags, "--model", models["beyond"], "--output_dir", "run", processes=2
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("--precision auto: beyond in bf16-autocast, since in a trial") == 1
    assert json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])["ratio_max"] >= 1


@torch.no_grad()
def grow(model: torch.nn.Module) -> None:
    """As steps do that make its values too large."""
    mlp = model.get_submodule("model.layers.0.mlp")
    mlp.down_proj.weight.fill_(6e4)
    mlp.up_proj.weight.fill_(100.0)


@pytest.mark.parametrize(
    ("steps", "update", "what"),
    [(1, 1, "the loss"), (4, 2, "an old log-probability")],
    ids=["within an update", "after one"],
)
def test_what_leaves_fp16_in_the_middle_of_a_run_is_told_by_its_place(
    models, steps, update, what, monkeypatch
):
    make = Optimizer.step

    def step(self: Optimizer, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        done = make(self, loss)
        if self.steps == steps:
            grow(self.model.model)
            weights = dict(self.model.named_parameters())
            for name, master in self.parameters.items():
                master.detach().copy_(weights[name])
        return done

    monkeypatch.setattr(Optimizer, "step", step)
    says = (
        rf"update {update}: {what} is NaN or infinite .*, since {PLACE} reaches .*, "
        r"and fp16's maximum is 65,504: --pr"
    )
    with pytest.raises(NotFiniteError, match=says):
        train(config(models["plain"], "run", precision="fp16"))


def test_a_reward_model_that_leaves_fp16_is_told_by_its_place(models, monkeypatch):
    call = ModelReward.__call__

    def after_a_while(self: ModelReward, groups: list) -> torch.Tensor:
        grow(self.model.model.model)
        return call(self, groups)

    monkeypatch.setattr(ModelReward, "__call__", after_a_while)
    judge = AutoModelForSequenceClassification.from_pretrained(models["plain"], num_labels=1)
    torch.nn.init.normal_(judge.score.weight)
    judge.save_pretrained("small")
    AutoTokenizer.from_pretrained(models["plain"]).save_pretrained("small")
    says = rf"a reward is NaN or infinite \(16 values\), since in reward {PLACE} reaches .*65,504: --prec"
    with pytest.raises(NotFiniteError, match=says):
        train(config(models["plain"], "run", precision="fp16", reward="small"))


def test_a_reference_that_leaves_fp16_is_told_by_its_place(tiny_model, tmp_path):
    reference = load_policy(tiny_model, dtype=torch.float16)
    grow(reference.model)
    columns = {
        "prompt_ids": [[5, 6], [7]],
        "first_ids": [[8, 0], [9]],
        "second_ids": [[4, 0], [3, 0]],
    }
    data, packing = {"data": Dataset.from_dict(columns)}, Packing(20)
    pairs = [("first_ids", "second_ids")]
    kept = ReferenceLogprobs(Accelerator(cpu=True), Share(), tmp_path, data, pairs, packing, [])
    says = (
        r"a log-probability of the reference is NaN or infinite \(\d values?\), "
        rf"since {PLACE} reaches .*65,504: --prec"
    )
    with pytest.raises(NotFiniteError, match=says):
        kept.compute(SecondModel(reference, torch.device("cpu"), offload=False), list)
