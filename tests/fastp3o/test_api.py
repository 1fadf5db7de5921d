"""Training from Python: the command's runs with objects in the place of names, and its files and errors."""

import ast
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
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import fastp3o
from fastp3o import DPOConfig, KTOConfig, P3OConfig, RewardModelConfig, SFTConfig, UserError, train
from fastp3o.cli import parse
from fastp3o.generate.config import GenerateConfig
from fastp3o.models.loading import load_policy
from fastp3o.training import loop as online
from tests.fastp3o.runs import assert_equal, config, copy_at_save_before, metrics, weights
from tests.fastp3o.together import together

CALLS = 0


@pytest.fixture(autouse=True)
def errors_name_arguments(monkeypatch: pytest.MonkeyPatch, errors_name_flags: None) -> None:
    monkeypatch.setattr(UserError, "names_flags", False)


def vowels(prompts, responses):
    return [sum(c in "aeiou" for c in response) / 4 for response in responses]


def third_without_a_name(prompts, responses, answer, /):
    return vowels(prompts, responses)


def interrupted_on_third_call(prompts, responses):
    global CALLS
    CALLS += len(responses) > 1  # not the trial before the run
    if CALLS == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return vowels(prompts, responses)


def records(name: str) -> list[dict]:
    return [json.loads(line) for line in Path(f"{name}.jsonl").read_text().splitlines()]


def without_data(tiny_model: str, output_dir: str, **changes) -> P3OConfig:
    """The command's configuration, without what objects stand for."""
    return config(tiny_model, output_dir, **{"prompts": "", "reward": "", "updates": 2} | changes)


# --- the same runs --------------------------------------------------------------------------------------------------


def test_objects_train_to_the_bits_of_the_command(tiny_model, workplace):
    online.train(config(tiny_model, "command", updates=2))
    prompts = records("prompts")
    for name, given in {"list": prompts, "dataset": Dataset.from_list(prompts), "name": "prompts.jsonl"}.items():
        result = train(without_data(tiny_model, name), prompts=given, reward=vowels)
        assert_equal(weights("command"), weights(name))
        assert metrics(name) == metrics("command")
        assert result.output_dir == Path(name)
    embeddings = weights("name")["model.embed_tokens.weight"]
    assert torch.equal(result.model.get_input_embeddings().weight, embeddings)
    assert result.tokenizer("a").input_ids == AutoTokenizer.from_pretrained(tiny_model)("a").input_ids


def test_a_loaded_model_trains_like_its_folder_and_stays_as_it_is(tiny_model, workplace):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    train(without_data("", "run"), model=model, prompts="prompts.jsonl", reward=vowels)
    online.train(config(tiny_model, "command", updates=2))
    assert_equal(weights("command"), weights("run"))
    assert_equal(before, model.state_dict())


def test_rewards_are_functions_and_names_with_weights_and_columns(tiny_model, workplace):
    async def answered(prompts, responses, answer, *, word):
        assert all(w in prompt and a == len(w) for prompt, a, w in zip(prompts, answer, word, strict=True))
        return [r + a for r, a in zip(vowels(prompts, responses), answer, strict=True)]

    both = without_data(tiny_model, "run", reward_weights="0.5,2", eval_every=1)
    given = {"prompts": records("answers"), "eval_prompts": records("answers")}
    result = train(both, **given, reward=[answered, "rewards_for_tests:varied"], gold_reward=vowels)
    for line in metrics("run"):
        first, second = (next(line[name] for name in line if name.endswith(part)) for part in ("answered", "varied"))
        assert line["reward"] == pytest.approx(0.5 * first + 2 * second)
    assert result.history["eval/gold"].notna().all()


def test_two_lambdas_are_two_rewards(tiny_model, workplace):
    rewards = [
        lambda prompts, responses: [float(len(r)) for r in responses],
        lambda prompts, responses: vowels(prompts, responses),
    ]
    result = train(without_data(tiny_model, "run"), prompts=records("prompts"), reward=rewards)
    parts = [name for name in result.history if name.startswith("reward/") and not name.endswith("_std")]
    assert len(parts) == 2
    assert not result.history[parts[0]].equals(result.history[parts[1]])


@pytest.mark.parametrize(
    ("config_class", "data", "metric"),
    [
        (SFTConfig, "sft", "loss"),
        (RewardModelConfig, "preferences", "accuracy"),
        (DPOConfig, "preferences", "accuracy"),
        (KTOConfig, "unpaired", "loss"),
    ],
)
def test_every_stage_takes_records(tiny_model, workplace, config_class, data, metric):
    settings = config_class(model=tiny_model, output_dir="run", batch_size=4, report_to="none", eval_every=1)
    result = train(settings, train_data=records(data), eval_data=Dataset.from_list(records(data)))
    steps = len(records(data)) // 4
    assert list(result.history.index) == list(range(steps + 1))
    assert result.history[f"eval/{metric}"].notna().all()
    assert result.history[metric].notna().tolist() == [False, *[True] * steps]
    assert result.model.num_parameters() > 0


def test_a_reward_model_of_one_run_is_the_reward_of_the_next(tiny_model, workplace):
    settings = RewardModelConfig(model=tiny_model, output_dir="rm", batch_size=4, report_to="none", precision="bf16")
    judge = train(settings, train_data=records("preferences"))
    assert judge.model.config.num_labels == 1
    # A run of another precision in the same process.
    train(without_data(tiny_model, "run"), prompts=records("prompts"), reward=str(judge.output_dir / "model"))
    assert len(metrics("run")) == 2


@pytest.mark.parametrize("kind", [SFTConfig, RewardModelConfig])
@pytest.mark.parametrize("saved", ["merged", "both", "adapter"])
def test_the_model_of_a_lora_run_is_loaded_whatever_was_saved(tiny_model, workplace, kind, saved):
    pytest.importorskip("peft")
    data = {SFTConfig: "sft.jsonl", RewardModelConfig: "preferences.jsonl"}[kind]
    settings = {"lora_rank": 2, "learning_rate": 0.1, "batch_size": 4, "eval_every": 1, "report_to": "none"}
    kept = {"keep_best": "loss", "best_is": "highest", "lora_save": saved}
    result = train(kind(model=tiny_model, output_dir="run", **settings, **kept), train_data=data, eval_data=data)
    assert Path("run/best/evaluation.json").exists()
    tokens = torch.tensor([[40, 41, 42]])
    start = AutoModelForCausalLM.from_pretrained(tiny_model)
    if kind is SFTConfig:
        assert (result.model(tokens).logits - start(tokens).logits).abs().max() > 0.01
    else:
        assert result.model(tokens).logits.abs().max() > 0.001
    assert result.best_model.num_parameters() > 0
    assert result.tokenizer.eos_token_id is not None


def test_an_adapter_names_the_place_that_a_loaded_model_came_from(tiny_model, workplace):
    pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    settings = SFTConfig(model="", output_dir="run", lora_rank=2, batch_size=4, report_to="none")
    train(settings, model=model, train_data="sft.jsonl")
    named = json.loads(Path("run/adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == os.path.abspath(tiny_model)
    # Nobody knows what the adapter of such a model would belong to.
    nameless, tokenizer = type(model)(model.config), AutoTokenizer.from_pretrained(tiny_model)
    nameless.name_or_path = ""
    train(replace(settings, output_dir="nameless"), model=nameless, tokenizer=tokenizer, train_data="sft.jsonl")
    assert Path("nameless/model").exists()
    assert not Path("nameless/adapter").exists()
    with pytest.raises(UserError, match="lora_save='adapter' needs the name of a model"):
        train(replace(settings, output_dir="alone", lora_save="adapter"), model=model, train_data="sft.jsonl")


def test_paths_are_names_and_none_is_nothing(tiny_model, workplace):
    settings = without_data("", Path("run"))
    prompts = Path("prompts.jsonl").absolute()
    train(settings, model=Path(tiny_model), prompts=prompts, reward=vowels, eval_prompts=None, on_update=None)
    online.train(config(tiny_model, "command", updates=2))
    assert_equal(weights("command"), weights("run"))


# --- callbacks, stopping, going on ----------------------------------------------------------------------------------


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
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert lines == seen
    assert list(result.history.index) == [0, 1, 2]
    train(without_data(tiny_model, "run", updates=4, resume=True), **data, reward=vowels)
    train(without_data(tiny_model, "whole", updates=4), **data, reward=vowels)
    assert_equal(weights("run"), weights("whole"))


def test_the_state_is_saved_if_a_callback_raises(tiny_model, workplace):
    def fails(metrics: dict) -> None:
        if metrics["step"] == 2:
            raise KeyError("a mistake of the caller's")

    given = {"prompts": records("prompts"), "reward": vowels}
    settings = without_data(tiny_model, "run", updates=3)
    with pytest.raises(KeyError, match="a mistake"):
        train(settings, **given, on_update=fails)
    assert sorted(path.name for path in Path("run/state").iterdir()) == ["step-000002"]
    train(replace(settings, resume=True), **given)
    train(replace(settings, output_dir="whole"), **given)
    assert_equal(weights("run"), weights("whole"))


@pytest.mark.parametrize("error", [partial(SystemExit, 3), KeyboardInterrupt, asyncio.CancelledError])
def test_the_state_is_saved_if_a_callback_ends_the_program(tiny_model, workplace, error):
    def ends(metrics: dict) -> None:
        raise error()  # made here: one that outlives the test keeps the frames of the run, and their models

    with pytest.raises(type(error())):
        train(without_data(tiny_model, "run"), prompts=records("prompts"), reward=vowels, on_update=ends)
    assert [path.name for path in Path("run/state").iterdir()] == ["step-000001"]


def test_a_callback_changes_nothing_of_the_run(tiny_model, workplace):
    def careless(metrics: dict) -> None:
        metrics.clear()
        os.chdir("/")
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        if child := os.fork():
            os.waitpid(child, 0)

    data = {"prompts": records("prompts"), "eval_prompts": records("prompts"), "reward": vowels}
    train(without_data(tiny_model, "plain"), **data)
    train(without_data(tiny_model, "run"), **data, on_update=careless, on_evaluation=careless)
    assert_equal(weights("run"), weights("plain"))
    assert metrics("run") == metrics("plain")


@pytest.mark.parametrize("place", ["callback", "reward", "thread"])
def test_a_process_trains_one_run_at_a_time(tiny_model, workplace, place):
    refused = []

    def train_another() -> None:
        with pytest.raises(UserError, match="a run trains in this process already"):
            train(without_data(tiny_model, "inner"), prompts="prompts.jsonl", reward=vowels)
        refused.append(place)

    def reward(prompts, responses):
        if place == "reward":
            train_another()
        return vowels(prompts, responses)

    def on_update(metrics: dict) -> None:
        if place == "callback":
            train_another()
        if place == "thread":
            (thread := threading.Thread(target=train_another)).start()
            thread.join()

    train(without_data(tiny_model, "run"), prompts="prompts.jsonl", reward=reward, on_update=on_update)
    assert refused == [place] * (3 if place == "reward" else 2)  # it is tried before the run
    assert len(metrics("run")) == 2


def test_a_trainer_of_the_callers_goes_on_after_a_run(tiny_model, workplace):
    AcceleratorState._reset_state()
    own = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    train(without_data(tiny_model, "run"), prompts="prompts.jsonl", reward=vowels)
    assert (own.mixed_precision, own.num_processes, own.gradient_accumulation_steps) == ("bf16", 1, 4)
    assert AcceleratorState().mixed_precision == "bf16"
    AcceleratorState._reset_state()
    GradientState._reset_state()


def test_torch_defaults_of_the_caller_change_nothing(tiny_model, workplace):
    given = {"prompts": "prompts.jsonl", "reward": vowels}
    train(without_data(tiny_model, "plain"), **given)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            train(without_data(tiny_model, "run"), **given)
            assert torch.is_inference_mode_enabled()
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_default_device().type == "meta"
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal(weights("run"), weights("plain"))


@pytest.fixture
def interrupts():
    """As in a terminal: what a shell starts in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_run_goes_on_in_the_same_process(tiny_model, workplace, interrupts):
    global CALLS
    CALLS = 0
    settings, given = without_data(tiny_model, "run", updates=4), {"prompts": records("prompts")}
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=r"SIGINT: stopped after update 2; resume=True goes on from there"):
        train(settings, **given, reward=interrupted_on_third_call)
    assert signal.getsignal(signal.SIGINT) is handler
    result = train(replace(settings, resume=True), **given, reward=interrupted_on_third_call)
    train(replace(settings, output_dir="whole"), **given, reward=vowels)
    assert_equal(weights("run"), weights("whole"))
    assert list(result.history.index) == [1, 2, 3, 4]


def test_the_command_and_python_go_on_from_each_other(tiny_model, workplace):
    flags = config(tiny_model, "whole", updates=3)
    online.train(flags)
    ends = {"on_update": lambda metrics: metrics["step"] == 1}
    sys.path.insert(0, str(workplace))
    try:
        import rewards_for_tests
    finally:
        sys.path.remove(str(workplace))
    given = {"prompts": records("prompts"), "reward": rewards_for_tests.vowels}
    train(without_data(tiny_model, "python", updates=3), **given, **ends)
    arguments = ["python/config.yaml", "--prompts", "prompts.jsonl", "--resume"]
    online.train(parse(P3OConfig, arguments))
    assert_equal(weights("python"), weights("whole"))

    train(replace(flags, output_dir="command"), **ends)
    train(without_data(tiny_model, "command", updates=3, resume=True), **given)
    assert_equal(weights("command"), weights("whole"))


PROGRAM = """
import os, sys
from pathlib import Path
from transformers import AutoModelForCausalLM
from fastp3o import P3OConfig, SFTConfig, train

def vowels(prompts, responses):
    return [sum(c in "aeiou" for c in response) / 4 for response in responses]

shared = {"report_to": "none", "precision": "fp32", "seed": 3}
seen = []
train(
    SFTConfig(model="", output_dir="sft", batch_size=4, **shared),
    model=AutoModelForCausalLM.from_pretrained(sys.argv[1]),
    train_data="sft.jsonl",
    on_update=lambda metrics: seen.append(metrics["step"]),
)
settings = {"updates": 3, "prompts_per_update": 8, "max_response_tokens": 6, "samples_every": 0}
result = train(
    P3OConfig(model="sft/model", output_dir="p3o", **settings, **shared),
    prompts="prompts.jsonl",
    reward=vowels,
    on_update=lambda metrics: metrics["step"] == 2,
)
Path(f"seen-{os.environ.get('RANK', 'alone')}").write_text(f"{seen}, {len(result.history)} rows")
"""


def test_processes_share_one_run_and_the_main_one_calls_back(tiny_model, workplace, monkeypatch):
    program = workplace / "program.py"
    program.write_text(PROGRAM)
    ended = together(program, tiny_model)
    assert ended.returncode == 0, ended.stdout
    assert Path("seen-0").read_text() == "[1, 2], 2 rows"
    assert Path("seen-1").read_text() == "[], 2 rows"
    alone = workplace / "alone"
    alone.mkdir()
    for name in ("sft.jsonl", "prompts.jsonl"):
        (alone / name).write_text((workplace / name).read_text())
    monkeypatch.chdir(alone)
    assert together(program, tiny_model, processes=1).returncode == 0
    for part in ("sft", "p3o"):
        for name, weight in weights(alone / part).items():
            torch.testing.assert_close(weight, weights(workplace / part)[name])


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({}, {"reward": vowels}, "^prompts is missing"),
        ({}, {"prompts": "prompts.jsonl"}, "^reward is missing"),
        (
            {"eval_every": 1},
            {"prompts": "prompts.jsonl", "reward": vowels},
            "^eval_every does nothing without eval_prompts",
        ),
        ({"split": "test"}, {"prompts": [{"prompt": "a"}], "reward": vowels}, "<prompts>: there is no split 'test'"),
        ({}, {"prompts": [{"prompt": 3}], "reward": vowels}, "<prompts> record 1"),
        ({}, {"prompts": ["a"], "reward": vowels}, "<prompts> record 1: expected an object"),
        ({}, {"prompts": iter([]), "reward": vowels}, "prompts must be a Dataset or a list of records"),
        (
            {},
            {"prompts": DatasetDict(train=Dataset.from_list([{"prompt": "a"}]))},
            "got a DatasetDict",
        ),
        ({}, {"prompts": pd.DataFrame({"prompt": ["a"]})}, "such as .* a DataFrame's to_dict"),
        ({}, {"train_data": []}, "P3OConfig has no train_data"),
        ({}, {"prompts": "prompts.jsonl", "reward": vowels, "tokenizer": 3}, "tokenizer= goes with a loaded model"),
        ({}, {"prompts": "prompts.jsonl", "reward": 3}, "reward must be a function or what reward takes, got a int"),
        ({}, {"prompts": "prompts.jsonl", "reward": third_without_a_name}, "columns of the data after them, by name"),
        ({}, {"prompts": "prompts.jsonl", "reward": lambda texts: []}, "must take prompts and responses first"),
        ({}, {"model": 3}, "model must be a transformers model"),
        ({"objective": "ppo"}, {"prompts": "prompts.jsonl", "reward": vowels}, "^objective is p3o in these options"),
        ({"report_to": " "}, {"prompts": "prompts.jsonl", "reward": vowels}, "^report_to must not be empty"),
        (
            {"reward_weights": "1,2"},
            {"prompts": "prompts.jsonl", "reward": vowels},
            "^reward_weights must be 1",
        ),
        ({"learning_rate": -1.0}, {}, "^learning_rate must be above 0, got -1.0"),
        ({"sampler": "vllm"}, {}, "^sampler vllm needs vllm_url"),
    ],
)
def test_mistakes_are_the_commands_errors(tiny_model, workplace, changes, given, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        train(without_data(tiny_model, "run", **changes), **given)
    assert not Path("run").exists()


def test_models_that_cannot_train_are_refused(tiny_model, workplace):
    settings, given = without_data("", "run"), {"prompts": "prompts.jsonl", "reward": vowels}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    with pytest.raises(UserError, match="tokenizer must be a transformers tokenizer, got a str"):
        train(settings, **given, model=model, tokenizer=tiny_model)
    with torch.device("meta"):
        empty = type(model)(model.config)
    with pytest.raises(UserError, match="model has no weights: they are on the meta device"):
        train(settings, **given, model=empty, tokenizer=tokenizer)
    model.generation_config.update(do_sample=False, temperature=0.1)
    with pytest.raises(
        UserError, match=r"model could not be saved after the run: GenerationConfig is invalid: .*temperature"
    ):
        train(settings, **given, model=model)
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    with pytest.raises(UserError, match="model has adapters: save it and its tokenizer, and name their folder"):
        train(settings, **given, model=adapted)
    assert not Path("run").exists()


def test_other_mistakes(tiny_model, workplace):
    settings, given = without_data(tiny_model, "run"), {"prompts": records("prompts"), "reward": vowels}
    with pytest.raises(TypeError, match="train\\(\\) has no argument promps"):
        train(settings, promps=[])  # type: ignore[call-arg]
    generate = GenerateConfig(model=tiny_model, output_dir="run", prompts="prompts.jsonl", reward="a:b")
    with pytest.raises(UserError, match="of a stage that trains, got a GenerateConfig"):
        train(generate)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="of a stage that trains, got a type"):
        train(P3OConfig, **given)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="a callback must return True, to end the run, False or None, got 'stop'"):
        train(settings, **given, on_update=lambda metrics: "stop")
    with pytest.raises(UserError, match="False or None, got tensor"):
        train(replace(settings, output_dir="other"), **given, on_update=lambda metrics: torch.ones(2))
    with pytest.raises(UserError, match="on_update must be a function, got a list"):
        train(settings, **given, on_update=[print])  # type: ignore[arg-type]
    with pytest.raises(UserError, match="on_evaluation does nothing without eval_data or eval_prompts"):
        train(settings, **given, on_evaluation=print)
    with pytest.raises(UserError, match="has no best"):
        _ = fastp3o.Result(Path("run")).best_model


# --- names ----------------------------------------------------------------------------------------------------------


def test_the_stub_has_the_names_of_the_package():
    stub = ast.parse((Path(fastp3o.__file__).parent / "__init__.pyi").read_text())
    imported = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported == set(fastp3o.__all__)
    for name in fastp3o.__all__:
        assert getattr(fastp3o, name).__name__ == name
    homes = {alias.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert homes == {name: f"fastp3o.{home}" for name, home in fastp3o.HOME.items()}


def test_importing_fastp3o_imports_nothing_heavy():
    program = (
        "import sys, fastp3o; print(*{'torch', 'transformers', 'datasets', 'numpy', 'accelerate'} & set(sys.modules))"
    )
    root = Path(fastp3o.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'kernels'}"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_a_loaded_reward_model_is_a_reward(tiny_model, workplace):
    settings = RewardModelConfig(model=tiny_model, output_dir="rm", batch_size=4, report_to="none")
    judge = train(settings, train_data=records("preferences"))
    train(without_data(tiny_model, "object"), prompts=records("prompts"), reward=judge.model)
    train(without_data(tiny_model, "name"), prompts=records("prompts"), reward="rm/model")
    assert_equal(weights("object"), weights("name"))
    policy = AutoModelForCausalLM.from_pretrained(tiny_model)
    with pytest.raises(UserError, match="reward must be a reward model, with a head `score`, got a Llama"):
        train(without_data(tiny_model, "other"), prompts=records("prompts"), reward=policy)


def test_an_error_of_a_users_function_has_its_own_frames_alone(tiny_model, workplace):
    def mistaken(prompts, responses):
        return {}[responses[0]]

    with pytest.raises(UserError, match=r"mistaken failed in .*test_api.py, line") as refused:
        train(without_data(tiny_model, "run"), prompts=records("prompts"), reward=mistaken)
    cause = refused.value.__cause__
    assert isinstance(cause, KeyError)
    assert [frame.name for frame in traceback.extract_tb(cause.__traceback__)] == ["mistaken"]
    assert len("".join(traceback.format_exception(refused.value)).splitlines()) < 25
    assert not Path("run").exists()


def test_a_notebook_shows_a_result(tiny_model, workplace):
    result = train(without_data(tiny_model, "run"), prompts=records("prompts"), reward=vowels)
    Path("run/progress.png").write_bytes(b"picture")  # tests draw none
    page = result._repr_html_()
    assert "data:image/png;base64," in page
    assert "<td>" in page
    assert "tokens_per_second" in page
    assert "<th>response</th>" in page


def test_the_readmes_ten_lines_train(workplace, tiny_model):
    code = (Path(__file__).parents[2] / "README.md").read_text().split("```python\n")[1].split("```")[0]
    for name, other in {"Qwen/Qwen3-0.6B": tiny_model, "runs/mine": "run", "questions.jsonl": "answers.jsonl"}.items():
        code = code.replace(name, other)
    code = code.replace("""chat_template_kwargs={"enable_thinking": False}""", "updates=1, report_to='none'")
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert len(names["result"].history) == 1


TUNING = {"output_dir": "run", "batch_size": 4, "report_to": "none", "learning_rate": 0.01, "train_data": "sft.jsonl"}


def test_peft_config_trains_merges_and_resumes(tiny_model, workplace):
    named = {"lora_alpha": 6, "lora_dropout": 0.1, "use_rslora": True}
    lora = pytest.importorskip("peft").LoraConfig(r=4, target_modules=["v_proj", "q_proj"], **named)
    settings = SFTConfig(model=tiny_model, **TUNING, epochs=2, save_every=3)
    train(settings, peft_config=lora)
    copy_at_save_before("run", "resumed")
    train(replace(settings, lora_rank=4, lora_targets="q_proj,v_proj", **named, output_dir="resumed", resume=True))
    assert_equal(weights("run"), weights("resumed"))
    adapter, name = load_file("run/adapter/adapter_model.safetensors"), "model.layers.0.self_attn.q_proj"
    down, up = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    start = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    torch.testing.assert_close(weights("run")[f"{name}.weight"], start[f"{name}.weight"] + 6 / 4**0.5 * up @ down)
    read = load_policy("run/adapter").model.state_dict()
    torch.testing.assert_close({key: read[key] for key in weights("run")}, weights("run"))


def test_what_of_peft_no_run_takes_is_refused(tiny_model, workplace):
    peft, model = pytest.importorskip("peft"), AutoModelForCausalLM.from_pretrained(tiny_model)
    for changes, message in (
        ({"use_dora": True, "modules_to_save": ["score"]}, "peft_config has modules_to_save, use_dora, which no opt"),
        ({"target_modules": "x"}, "peft_config needs target_modules: names in a list, or 'all-linear', got 'x'"),
        ({"lora_alpha": 5}, "lora_alpha is 4.0 in the configuration, and 5 in peft_config"),
    ):
        lora = peft.LoraConfig(**({"target_modules": ["q_proj"]} | changes))
        with pytest.raises(UserError, match=message):
            train(SFTConfig(model=tiny_model, **TUNING, lora_rank=8, lora_alpha=4.0), peft_config=lora)
    wrapped = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), peft.LoraConfig())
    model.add_adapter(peft.LoraConfig())
    for adapted in (wrapped, wrapped.get_base_model(), model):
        with pytest.raises(UserError, match="model has adapters: save it and its tokenizer, and name their folder"):
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
    pairs = TUNING | {"train_data": "preferences.jsonl", "eval_data": "preferences.jsonl", "output_dir": "dpo"}
    train(DPOConfig(model="owner/base", model_revision="2" * 40, **pairs))
    assert metrics("dpo", "eval.jsonl")[0]["k2"] < 1e-9  # the reference, too
    with pytest.raises(UserError, match="model_revision is of a hub's repository"):
        train(config, model=tiny_model)
