"""Training from Python: the command's runs with objects in the place of names, and its files and
errors.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from dataclasses import replace
from pathlib import Path

import datasets
import pandas as pd
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GgufConfig,
)

import fastp3o
from fastp3o import DPOConfig, P3OConfig, RewardModelConfig, SFTConfig, UserError, train
from fastp3o.cli import parse
from fastp3o.data.errors import RecordError
from fastp3o.generate.config import GenerateConfig
from fastp3o.models.loading import load_policy
from fastp3o.training import loop as online
from fastp3o.training.api import users_error
from tests.fastp3o.runs import (
    assert_equal,
    assert_resumes,
    config,
    metrics,
    records,
    vowels,
    weights,
)
from tests.fastp3o.together import together

PROMPTS = "prompts.jsonl"


@pytest.fixture(autouse=True)
def errors_name_arguments(monkeypatch: pytest.MonkeyPatch, errors_name_flags: None) -> None:
    monkeypatch.setattr(UserError, "names_flags", False)


GIVEN = {"prompts": PROMPTS, "reward": vowels}


def without_data(tiny_model: str, output_dir: str, **changes) -> P3OConfig:
    """The command's configuration, without what objects stand for."""
    return config(tiny_model, output_dir, **{"prompts": "", "reward": "", "updates": 2} | changes)


def test_objects_train_to_the_bits_of_the_command(tiny_model, workplace):
    online.train(config(tiny_model, "command", updates=2))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    prompts = records("prompts")
    for name, start, given in (
        ("list", tiny_model, prompts),
        ("dataset", Path(tiny_model), Dataset.from_list(prompts)),
        ("loaded", model, Path(PROMPTS).absolute()),
    ):
        settings = without_data("", Path(name))
        result = train(
            settings, model=start, prompts=given, reward=vowels, eval_prompts=None, on_update=None
        )
        assert_equal(weights("command"), weights(name))
        assert metrics(name) == metrics("command")
        assert result.output_dir == Path(name)
    assert_equal(before, model.state_dict())
    embeddings = weights("loaded")["model.embed_tokens.weight"]
    assert torch.equal(result.model.get_input_embeddings().weight, embeddings)
    assert (
        result.tokenizer("a").input_ids == AutoTokenizer.from_pretrained(tiny_model)("a").input_ids
    )


def test_rewards_are_functions_and_names_with_weights_and_columns(tiny_model, workplace):
    async def answered(prompts, responses, answer, *, word):
        assert all(
            w in prompt and a == len(w) for prompt, a, w in zip(prompts, answer, word, strict=True)
        )
        return [r + a for r, a in zip(vowels(prompts, responses), answer, strict=True)]

    both = without_data(tiny_model, "run", reward_weights="0.5,2", eval_every=1)
    given = {"prompts": records("answers"), "eval_prompts": records("answers")}
    result = train(both, **given, reward=[answered, "rewards_for_tests:varied"], gold_reward=vowels)
    for line in metrics("run"):
        first, second = (
            next(line[name] for name in line if name.endswith(part))
            for part in ("answered", "varied")
        )
        assert line["reward"] == pytest.approx(0.5 * first + 2 * second)
    assert result.history["eval/gold"].notna().all()
    # Two functions of one name are two rewards.
    lambdas = [
        lambda prompts, responses: [float(len(r)) for r in responses],
        lambda p, r: vowels(p, r),
    ]
    result = train(without_data(tiny_model, "lambdas", updates=1), prompts=PROMPTS, reward=lambdas)
    parts = [
        name for name in result.history if name.startswith("reward/") and not name.endswith("_std")
    ]
    assert len(parts) == 2
    assert not result.history[parts[0]].equals(result.history[parts[1]])


def test_a_reward_model_of_one_run_is_the_reward_of_the_next_by_name_and_loaded(
    tiny_model, workplace
):
    settings = RewardModelConfig(
        model=tiny_model, output_dir="rm", batch_size=4, report_to="none", precision="bf16"
    )
    judge = train(settings, train_data=records("preferences"))
    # Runs of another precision in the same process.
    train(without_data(tiny_model, "object"), prompts=PROMPTS, reward=judge.model)
    train(without_data(tiny_model, "name"), prompts=PROMPTS, reward="rm/model")
    assert_equal(weights("object"), weights("name"))
    policy = AutoModelForCausalLM.from_pretrained(tiny_model)
    with pytest.raises(
        UserError, match="reward must be a reward model, with a head `score`, got a Llama"
    ):
        train(without_data(tiny_model, "other"), prompts=PROMPTS, reward=policy)


@pytest.mark.parametrize("kind", [SFTConfig, RewardModelConfig])
@pytest.mark.parametrize("saved", ["merged", "adapter"])
def test_the_model_of_a_lora_run_is_loaded_whatever_was_saved(tiny_model, workplace, kind, saved):
    pytest.importorskip("peft")
    data = {SFTConfig: "sft.jsonl", RewardModelConfig: "preferences.jsonl"}[kind]
    kept = {
        "keep_best": "loss",
        "best_is": "highest",
        "lora_save": saved,
        "lora_rank": 2,
        "learning_rate": 0.1,
    }
    settings = kind(model=tiny_model, output_dir="run", batch_size=4, report_to="none", **kept)
    result = train(settings, train_data=data, eval_data=data)
    tokens, start = torch.tensor([[40, 41, 42]]), AutoModelForCausalLM.from_pretrained(tiny_model)
    logits = result.model(tokens).logits
    assert (logits - start(tokens).logits if kind is SFTConfig else logits).abs().max() > 0.001
    assert result.best_model.num_parameters() > 0
    assert result.tokenizer.eos_token_id is not None


def test_an_adapter_names_the_place_that_a_loaded_model_came_from(tiny_model, workplace):
    pytest.importorskip("peft")
    settings = SFTConfig(model="", output_dir="run", lora_rank=2, batch_size=4, report_to="none")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tiny_model),
        AutoTokenizer.from_pretrained(tiny_model),
    )
    train(settings, model=model, train_data="sft.jsonl")
    named = json.loads(Path("run/adapter/adapter_config.json").read_text())[
        "base_model_name_or_path"
    ]
    assert named == os.path.abspath(tiny_model)
    # Nobody knows what the adapter of such a model would belong to.
    model.name_or_path = ""
    train(
        replace(settings, output_dir="nameless"),
        model=model,
        tokenizer=tokenizer,
        train_data="sft.jsonl",
    )
    assert Path("nameless/model").exists()
    assert not Path("nameless/adapter").exists()


def test_a_model_whose_weights_were_dequantized_trains_saves_and_resumes(tiny_model, workplace):
    """As transformers leaves that of a GGUF: its configuration still says that it is quantized."""
    model, settings = (
        AutoModelForCausalLM.from_pretrained(tiny_model),
        {"batch_size": 4, "report_to": "none"},
    )
    model.config.quantization_config, model.is_quantized = GgufConfig(gguf_file="model.gguf"), True
    for folder, lora_rank in (("run", 0), ("run", 0), ("adapted", 2)):
        config = SFTConfig(
            output_dir=folder, resume=Path(folder).exists(), lora_rank=lora_rank, **settings
        )
        result = train(config, model=model, train_data="sft.jsonl")
        assert "quantization_config" not in json.loads(
            Path(folder, "model/config.json").read_text()
        )
        assert not hasattr(result.model.config, "quantization_config")
    assert model.config.quantization_config.gguf_file == "model.gguf"
    judge = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    judge.config.quantization_config = model.config.quantization_config
    train(without_data(tiny_model, "judged"), prompts=PROMPTS, reward=judge)
    model.model.norm.weight.data = model.model.norm.weight.data.to(torch.float8_e4m3fn)
    with pytest.raises(
        UserError, match=r"in torch\.float8_e4m3fn; quantized weights are not loaded"
    ):
        train(SFTConfig(output_dir="eight bits", **settings), model=model, train_data="sft.jsonl")


def test_a_callback_sees_every_step_and_ends_the_run(tiny_model, workplace):
    seen, evaluated = [], []

    def on_update(metrics: dict) -> bool:
        seen.append(metrics)
        return metrics["step"] == 2

    data = {"prompts": records("prompts"), "eval_prompts": records("prompts")}
    callbacks = {"on_update": on_update, "on_evaluation": evaluated.append}
    result = train(without_data(tiny_model, "run", updates=4), **data, reward=vowels, **callbacks)
    assert [line["step"] for line in seen] == [1, 2]
    assert [line["step"] for line in evaluated] == [0, 2]
    assert [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()] == seen
    assert list(result.history.index) == [0, 1, 2]


@pytest.mark.parametrize("error", [KeyError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_the_state_is_saved_if_a_callback_raises_or_ends_the_program(tiny_model, workplace, error):
    def ends(metrics: dict) -> None:
        # made here: one that outlives the test keeps the frames of the run, and their models
        raise error(3)

    with pytest.raises(error):
        train(without_data(tiny_model, "run"), **GIVEN, on_update=ends)
    assert [path.name for path in Path("run/state").iterdir()] == ["step-000001"]


def test_what_the_caller_has_set_and_a_callback_changes_alters_nothing_of_the_run_and_stays(
    tiny_model, workplace
):
    def careless(metrics: dict) -> None:
        metrics.clear()
        os.chdir("/")

    given = {**GIVEN, "eval_prompts": PROMPTS}
    train(without_data(tiny_model, "plain"), **given)
    AcceleratorState._reset_state()
    own = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    torch.set_default_dtype(torch.float64)
    try:
        with (
            torch.inference_mode(),
            torch.autocast("cpu", dtype=torch.bfloat16),
            torch.device("meta"),
        ):
            train(
                without_data(tiny_model, "run"), **given, on_update=careless, on_evaluation=careless
            )
            assert (torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")) == (
                True,
                True,
            )
            assert torch.get_default_device().type == "meta"
        assert torch.get_default_dtype() == torch.float64
        assert (own.mixed_precision, own.num_processes, own.gradient_accumulation_steps) == (
            "bf16",
            1,
            4,
        )
        assert AcceleratorState().mixed_precision == "bf16"
    finally:
        torch.set_default_dtype(torch.float32)
        AcceleratorState._reset_state()
        GradientState._reset_state()
    assert_equal(weights("run"), weights("plain"))
    assert metrics("run") == metrics("plain")


def test_a_process_trains_one_run_at_a_time(tiny_model, workplace):
    refused = []

    def train_another(place: str) -> None:
        with pytest.raises(UserError, match="a run trains in this process already"):
            train(without_data(tiny_model, "inner"), **GIVEN)
        refused.append(place)

    def on_update(metrics: dict) -> None:
        train_another("callback")
        (thread := threading.Thread(target=train_another, args=["thread"])).start()
        thread.join()

    train(without_data(tiny_model, "run", updates=1), **GIVEN, on_update=on_update)
    assert refused == ["callback", "thread"]


@pytest.fixture
def interrupts():
    """As in a terminal: what a shell starts in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_run_goes_on_in_the_same_process(tiny_model, workplace, interrupts):
    def interrupted_after_two(metrics: dict) -> None:
        if metrics["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    settings, given = (
        without_data(tiny_model, "run", updates=4),
        {"prompts": records("prompts"), "reward": vowels},
    )
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(
        KeyboardInterrupt, match=r"SIGINT: stopped after update 2; resume=True continues from there"
    ):
        train(settings, **given, on_update=interrupted_after_two)
    assert signal.getsignal(signal.SIGINT) is handler
    result = train(replace(settings, resume=True), **given)
    train(replace(settings, output_dir="whole"), **given)
    assert_equal(weights("run"), weights("whole"))
    assert list(result.history.index) == [1, 2, 3, 4]


def test_the_command_and_python_go_on_from_each_other(tiny_model, workplace, monkeypatch):
    monkeypatch.syspath_prepend(workplace)
    import rewards_for_tests

    flags = config(tiny_model, "whole", updates=3)
    online.train(flags)
    ends = {"on_update": lambda metrics: metrics["step"] == 1}
    given = {"prompts": records("prompts"), "reward": rewards_for_tests.vowels}
    train(without_data(tiny_model, "python", updates=3), **given, **ends)
    online.train(parse(P3OConfig, ["python/config.yaml", "--prompts", PROMPTS, "--resume"]))
    assert_equal(weights("python"), weights("whole"))
    train(replace(flags, output_dir="command"), **ends)
    train(without_data(tiny_model, "command", updates=3, resume=True), **given)
    assert_equal(weights("command"), weights("whole"))


PROGRAM = """
import os, sys
from pathlib import Path
from transformers import AutoModelForCausalLM
from fastp3o import train
from tests.fastp3o.runs import config

folder, model = sys.argv[1], AutoModelForCausalLM.from_pretrained(sys.argv[2])
seen = []
result = train(
    config("", folder, updates=3, learning_rate=1e-4),
    model=model,
    on_update=lambda metrics: seen.append(metrics["step"]) or metrics["step"] == 2,
)
Path(f"{folder}/seen-{os.environ.get('RANK', 'alone')}").write_text(f"{seen}, {len(result.history)} rows")
"""


def test_processes_share_one_run_and_the_main_one_calls_back(tiny_model, workplace):
    program = workplace / "program.py"
    program.write_text(PROGRAM)
    for folder, processes in (("two", 2), ("alone", 1)):
        ended = together(program, folder, tiny_model, processes=processes)
        assert ended.returncode == 0, ended.stdout
    assert Path("two/seen-0").read_text() == "[1, 2], 2 rows"
    assert Path("two/seen-1").read_text() == "[], 2 rows"
    for name, weight in weights("alone").items():
        torch.testing.assert_close(weight, weights("two")[name])


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({}, {"prompts": None}, "^prompts is missing"),
        ({"learning_rate": -1.0}, {}, "^learning_rate must be 0 or more, got -1.0"),
        ({"split": "test"}, {"prompts": [{"prompt": "a"}]}, "<prompts>: there is no split 'test'"),
        ({}, {"prompts": ["a"]}, "<prompts> record 1: expected an object"),
        ({}, {"prompts": iter([])}, "prompts must be a Dataset or a list of records"),
        ({}, {"prompts": pd.DataFrame({"prompt": ["a"]})}, "got a DataFrame"),
        (
            {},
            {"prompts": DatasetDict(train=Dataset.from_list([{"prompt": "a"}]))},
            "got a DatasetDict",
        ),
        ({}, {"train_data": []}, "P3OConfig has no train_data"),
        ({}, {"tokenizer": 3}, "tokenizer= goes with a loaded model"),
        ({}, {"model": 3}, "model must be a transformers model"),
        ({}, {"reward": 3}, "reward must be a function or what reward takes, got a int"),
        (
            {},
            {"reward": lambda prompts, responses, answer, /: []},
            "columns of the data after them, by name",
        ),
        (
            {},
            {"reward": "environment", "environment": dict},
            "must be a class with the methods reset and step",
        ),
        ({}, {"on_update": [print]}, "on_update must be a function, got a list"),
        (
            {},
            {"on_evaluation": print},
            "on_evaluation has no effect without eval_data or eval_prompts",
        ),
    ],
)
def test_mistakes_are_the_commands_errors(tiny_model, workplace, changes, given, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        train(without_data(tiny_model, "run", **changes), **GIVEN | given)
    assert not Path("run").exists()


def test_models_and_callbacks_that_do_not_fit_are_refused(tiny_model, workplace):
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tiny_model),
        AutoTokenizer.from_pretrained(tiny_model),
    )
    with torch.device("meta"):
        empty = type(model)(model.config)
    contradictory = AutoModelForCausalLM.from_pretrained(tiny_model)
    contradictory.generation_config.update(do_sample=False, temperature=0.1)
    lora = {"lora_rank": 2, "lora_save": "adapter"}
    for changes, objects, message in (
        (
            {},
            {"model": model, "tokenizer": tiny_model},
            "tokenizer must be a transformers tokenizer, got a str",
        ),
        (
            {},
            {"model": empty, "tokenizer": tokenizer},
            "model has no weights: they are on the meta device",
        ),
        (
            {},
            {"model": contradictory},
            "could not be saved after the run: GenerationConfig is invalid: .*temperature",
        ),
        (lora, {"model": model}, "lora_save='adapter' needs the name of a model"),
    ):
        with pytest.raises(UserError, match=message):
            train(without_data("", "run", **changes), **GIVEN, **objects)
        assert not Path("run").exists()
    for output_dir, returned in {"text": "stop", "tensor": torch.ones(2)}.items():
        with pytest.raises(
            UserError, match="a callback must return True, to end the run, False or None, got"
        ):
            train(
                without_data(tiny_model, output_dir),
                **GIVEN,
                on_update=lambda metrics, end=returned: end,
            )
    with pytest.raises(TypeError, match="train\\(\\) has no argument promps"):
        train(without_data(tiny_model, "run"), promps=[])  # type: ignore[call-arg]
    generate = GenerateConfig(model=tiny_model, output_dir="run", prompts=PROMPTS, reward="a:b")
    with pytest.raises(UserError, match="of a stage that trains, got a GenerateConfig"):
        train(generate)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="has no best"):
        _ = fastp3o.Result(Path("run")).best_model


def test_an_error_of_a_users_function_has_its_own_frames_alone(tiny_model, workplace):
    def mistaken(prompts, responses):
        return {}[responses[0]]

    with pytest.raises(UserError, match=r"mistaken failed in .*test_api.py, line") as refused:
        train(without_data(tiny_model, "run"), prompts=PROMPTS, reward=mistaken)
    cause = refused.value.__cause__
    assert isinstance(cause, KeyError)
    assert [frame.name for frame in traceback.extract_tb(cause.__traceback__)] == ["mistaken"]


def test_the_stub_names_where_everything_of_the_package_is():
    assert {"train", "P3OConfig", "UserError"} <= {*fastp3o.__all__}
    for name in fastp3o.__all__:
        assert getattr(fastp3o, name).__name__ == name


def test_the_readmes_first_block_trains(workplace, tiny_model, monkeypatch):
    """As it stands, but for the names of a model and a data set on the hub, and a shorter run."""
    pytest.importorskip("math_verify")
    code = (
        (Path(__file__).parents[2] / "README.md")
        .read_text()
        .split("```python\n")[1]
        .split("```")[0]
    )
    rows = [
        {"question": f"How much is {one} + 1?", "answer": f"One more.\n#### {one + 1}"}
        for one in range(64)
    ]
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, part, split: datasets.Dataset.from_list(rows)
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained("chats")
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained("chats")
    code = code.replace("Qwen/Qwen3-0.6B", "chats").replace("runs/gsm8k", "run")
    short = "updates=1, max_response_tokens=8, report_to='none',"
    code = code.replace('chat_template_kwargs={"enable_thinking": False},', short)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert len(names["result"].history) == 1


TUNING = {
    "output_dir": "run",
    "batch_size": 4,
    "report_to": "none",
    "learning_rate": 0.01,
    "train_data": "sft.jsonl",
}


def test_peft_config_trains_merges_and_resumes(tiny_model, workplace):
    named = {"lora_alpha": 6, "lora_dropout": 0.1, "use_rslora": True}
    lora = pytest.importorskip("peft").LoraConfig(r=4, target_modules=["v_proj", "q_proj"], **named)
    settings = SFTConfig(model=tiny_model, **TUNING, epochs=2, save_every=3)
    train(settings, peft_config=lora)
    assert_resumes(replace(settings, lora_rank=4, lora_targets="q_proj,v_proj", **named))
    adapter, name = (
        load_file("run/adapter/adapter_model.safetensors"),
        "model.layers.0.self_attn.q_proj",
    )
    down, up = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    start = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    torch.testing.assert_close(
        weights("run")[f"{name}.weight"], start[f"{name}.weight"] + 6 / 4**0.5 * up @ down
    )
    read = load_policy("run/adapter").model.state_dict()
    torch.testing.assert_close({key: read[key] for key in weights("run")}, weights("run"))


def test_what_of_peft_no_run_takes_is_refused(tiny_model, workplace):
    peft, model = pytest.importorskip("peft"), AutoModelForCausalLM.from_pretrained(tiny_model)
    for changes, message in (
        (
            {"use_dora": True, "modules_to_save": ["score"]},
            "peft_config has modules_to_save, use_dora, which no opt",
        ),
        (
            {"target_modules": "x"},
            "peft_config needs target_modules: names in a list, or 'all-linear', got 'x'",
        ),
        ({"lora_alpha": 5}, "lora_alpha is 4.0 in the configuration, and 5 in peft_config"),
    ):
        lora = peft.LoraConfig(**({"target_modules": ["q_proj"]} | changes))
        with pytest.raises(UserError, match=message):
            train(
                SFTConfig(model=tiny_model, **TUNING, lora_rank=8, lora_alpha=4.0), peft_config=lora
            )
    wrapped = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model), peft.LoraConfig()
    )
    peft.inject_adapter_in_model(peft.LoraConfig(), model)
    for adapted in (wrapped, wrapped.get_base_model(), model):
        with pytest.raises(
            UserError, match="model has adapters: save it and its tokenizer, and name their folder"
        ):
            train(SFTConfig(model="", **TUNING), model=adapted)
    with pytest.raises(UserError, match="reward has adapters"):
        train(without_data(tiny_model, "run"), prompts="prompts.jsonl", reward=wrapped)


def test_a_run_begins_with_a_revision_and_says_so(tiny_model, workplace, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--base"
    (repository / "refs").mkdir(parents=True)
    for name, commit in {"main": "1" * 40, "older": "2" * 40}.items():
        older = shutil.copytree(tiny_model, repository / "snapshots" / commit)
        (repository / "refs" / name).write_text(commit)
    moved = {name: weight * 1.5 for name, weight in load_file(older / "model.safetensors").items()}
    save_file(moved, older / "model.safetensors", metadata={"format": "pt"})
    (older / "chat_template.jinja").write_text("older")
    config = SFTConfig(model="owner/base", model_revision="older", lora_rank=2, **TUNING)
    train(config)
    train(SFTConfig(model=str(older), lora_rank=2, **(TUNING | {"output_dir": "folder"})))
    assert metrics("run") == metrics("folder")
    assert Path("run/model/chat_template.jinja").read_text() == "older"
    assert "- its revision: older" in Path("run/model/README.md").read_text()
    read = load_policy("run/adapter").model.state_dict()
    torch.testing.assert_close({key: read[key] for key in weights("run")}, weights("run"))
    pairs = TUNING | {
        "train_data": "preferences.jsonl",
        "eval_data": "preferences.jsonl",
        "output_dir": "dpo",
    }
    train(DPOConfig(model="owner/base", model_revision="2" * 40, **pairs))
    assert metrics("dpo", "eval.jsonl")[0]["k2"] < 1e-9  # the reference, too
    with pytest.raises(UserError, match="model_revision needs the name of a hub repository"):
        train(config, model=tiny_model)


SETTINGS = """
import torch
import fastp3o
try:
    fastp3o.train(None)
except fastp3o.UserError:
    print(torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch does not say them"
)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32"}, "max_split_size_mb:32"),
    ],
)
def test_a_run_asks_for_memory_as_the_command_does_and_leaves_settings_of_the_environment(
    given, expected
):
    """torch reads the settings once, as its allocator starts."""
    kept = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    ran = subprocess.run(
        [sys.executable, "-c", SETTINGS], env=kept | given, capture_output=True, text=True
    )
    assert ran.stdout.strip() == expected, ran.stderr


def test_an_error_of_a_record_is_told_once():
    error = RecordError("answer", "text", 3)
    assert str(error) == "field 'answer': expected text, got the number 3"
    with pytest.raises(UserError) as told:
        raise error.at("questions.jsonl", 2) from error
    assert users_error(told.value) is None
