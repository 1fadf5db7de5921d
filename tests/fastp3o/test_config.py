import importlib
import re
import runpy
import subprocess
import sys
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
from transformers import SchedulerType

from fastp3o.cli import __file__ as cli_file
from fastp3o.cli import parse, parse_chosen, section
from fastp3o.config import ObjectiveConfig, conditions, option
from fastp3o.errors import UserError, naming_the_extra
from fastp3o.evaluation.config import EvaluateConfig, WinRateConfig
from fastp3o.generate.config import GenerateConfig
from fastp3o.objectives.config.function import FunctionConfig
from fastp3o.objectives.config.online import OBJECTIVES
from fastp3o.objectives.config.p3o import P3OConfig, PPGConfig
from fastp3o.objectives.config.policy_gradient import GRPOConfig
from fastp3o.objectives.config.ppo import PPOConfig
from fastp3o.objectives.config.preferences import OFFLINE_OBJECTIVES
from fastp3o.training.config import RewardModelConfig
from fastp3o.training.sft import SFTConfig
from fastp3o.trl_names import hint, trl_names
from fastp3o_kernels import P3OSettings
from fastp3o_kernels.p3o.settings import CHOICES

CONFIGS = [
    P3OConfig,
    PPGConfig,
    PPOConfig,
    GRPOConfig,
    SFTConfig,
    RewardModelConfig,
    *OFFLINE_OBJECTIVES.values(),
]
GIVEN = {"model": "m", "output_dir": "o", "prompts": "p", "reward": "r"}
P3O = [f"--{name}={value}" for name, value in GIVEN.items()]


def test_flags_and_a_yaml_file_set_fields_and_flags_override_the_file(tmp_path):
    config = parse(
        P3OConfig,
        [*P3O, "--kl-coef", "0.1", "--clipping=separate", "--resume", "--learning-rate=1e-3"],
    )
    got = (config.kl_coef, config.clipping, config.resume, config.learning_rate)
    assert got == (0.1, "separate", True, 1e-3)
    path = tmp_path / "run.yaml"
    values = "model: 1e5\noutput_dir: 2026-01-01\nprompts: 12:30\nreward: -x\neval_at: ''\n"
    path.write_text(values + "resume: yes\nseed: 010\nlearning_rate: 1e-4\nkl_coef: 0.2\n")
    config = parse(P3OConfig, [str(path), "--kl_coef", "0.3"])
    # As they are written.
    assert (config.model, config.output_dir, config.prompts, config.reward) == (
        "1e5",
        "2026-01-01",
        "12:30",
        "-x",
    )
    assert (config.eval_at, config.resume, config.seed) == ("", True, 10)
    assert (config.learning_rate, config.kl_coef) == (1e-4, 0.3)


@pytest.mark.parametrize("chosen", CONFIGS)
def test_a_flag_that_is_declared_again_stays_changeable_and_needs_flags_that_exist(chosen):
    for flag in fields(chosen):
        for base in chosen.__mro__[1:]:
            inherited = {field.name: field for field in fields(base)} if is_dataclass(base) else {}
            if flag.name in inherited and inherited[flag.name].metadata.get("changeable"):
                assert flag.metadata.get("changeable"), flag.name
        needs = {need.flag for need in conditions(flag.metadata.get("needs", ()))}
        assert not needs or {name.name for name in fields(chosen)} & needs, flag.name


def test_a_value_of_another_type_is_refused_in_python():
    wrong = [
        ("updates", "3", "an integer"),
        ("updates", 2.5, "an integer"),
        ("seed", True, "an integer"),
    ]
    wrong += [
        ("learning_rate", "1e-5", "a number"),
        ("resume", "no", "True or False"),
        ("output_dir", ["a"], "text"),
    ]
    for name, value, expected in wrong:
        with pytest.raises(
            UserError, match=re.escape(f"--{name} must be {expected}, got {value!r}")
        ):
            P3OConfig(**GIVEN | {name: value})


def test_python_may_have_objects_where_commands_have_text_and_numbers(tmp_path):
    odd = {
        "updates": np.int64(3),
        "learning_rate": np.float32(0.25),
        "lr_schedule": SchedulerType.COSINE,
    }
    config = P3OConfig(model="m", output_dir=tmp_path, **odd)
    got = [config.updates, config.learning_rate, config.lr_schedule, config.output_dir]
    assert got == [3, 0.25, "cosine", str(tmp_path)]
    assert [type(value) for value in got] == [int, float, str, str]
    with pytest.raises(UserError, match="--temperature must be a finite number"):
        P3OConfig(model="m", output_dir="o", temperature=np.float32("nan"))
    further = {"reward_columns": ("answer",), "chat_template_kwargs": {"enable_thinking": False}}
    config = P3OConfig(**GIVEN | {"reward": "a:f,b:g"}, reward_weights=[0.5, 2], **further)
    assert (config.reward_weights, config.weights, config.reward_columns) == (
        "0.5,2",
        [0.5, 2.0],
        "answer",
    )
    assert config.reading["chat_template_kwargs"] == {"enable_thinking": False}


def test_evaluations_come_regularly_at_given_updates_and_last():
    config = P3OConfig(**GIVEN, eval_prompts="e", eval_at="1, 3", eval_every=4, updates=10)
    assert [update for update in range(1, 11) if config.evaluates_after(update, last=10)] == [
        1,
        3,
        4,
        8,
        10,
    ]


def shown_help(capsys, config, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(config, ["--help", *arguments])
    assert not ended.value.code
    return capsys.readouterr().out


def test_options_come_with_those_of_the_class_itself_first():
    names = [flag.name for flag in fields(P3OConfig)]
    assert names[:5] == ["learning_rate", "objective", "clipping", "clip_range", "ratio_cap"]
    assert all(f"    {name} (default" in P3OConfig.__doc__ for name in names)
    assert "Options:" not in P3OConfig.summary + RewardModelConfig.summary


@pytest.mark.parametrize("config", CONFIGS)
def test_help_begins_with_what_is_required_and_shows_the_rest_in_sections(capsys, config):
    required = [flag.name for flag in fields(config) if flag.metadata.get("required")]
    short, whole = shown_help(capsys, config), shown_help(capsys, config, "all")
    for shown in (short, whole):
        assert all(f"--{name} " in " ".join(shown.splitlines()[:10]) for name in required)
    everything = re.findall(r"^  --(\w+)", whole, re.MULTILINE)
    negated = {f"no_{flag.name}" for flag in fields(config) if flag.default is True}
    assert sorted({*everything} - negated) == sorted(flag.name for flag in fields(config))
    assert everything[: len(required)] == required
    titles = re.findall(r"^(\w[\w ]*):$", whole, re.MULTILINE)
    assert titles[0] == "required"
    assert titles[-1] == "run"
    listed = re.findall(r"^  --(\w+)", short, re.MULTILINE)
    assert {*required} <= {*listed} < {*everything}
    of_objective = {flag.name for flag in fields(config) if section(config, flag) == "objective"}
    assert of_objective <= {*listed}, "the short help shows all options of an objective"
    assert (
        f"{len({*everything} - negated) - len({*listed} - negated)} further options: --help all"
        in short
    )
    assert "further options" not in whole


def test_help_says_bounds_and_defaults_but_none_of_what_is_empty(capsys):
    said = " ".join(shown_help(capsys, P3OConfig, "all").split())
    assert "(at least 0 and below 1; default: 0.9)" in said
    assert "(default: )" not in said
    assert "default: None" not in said
    assert "--learning-rate" not in said


def refusal(capsys, config, *arguments: str) -> str:
    with pytest.raises(SystemExit):
        parse(config, [*arguments])
    return capsys.readouterr().err.splitlines()[-1]


def test_unknown_options_are_told_all_at_once_and_before_those_that_are_missing(capsys):
    line = refusal(capsys, P3OConfig, "--model_name_or_path", "m", "--reward_funcs", "f", "--odd=1")
    assert "model_name_or_path is --model here" in line
    assert "reward_funcs is --reward here" in line
    assert line.endswith(", --odd")
    assert "missing" not in line
    assert refusal(capsys, P3OConfig, "--model", "m").endswith(
        "missing: --prompts, --reward, --output_dir"
    )
    assert "the nearest one is --learning_rate" in refusal(capsys, P3OConfig, "--lr", "1e-5")


def test_what_commas_separate_may_be_a_list_in_a_yaml_file_and_in_python(tmp_path, capsys):
    path, rest = tmp_path / "run.yaml", ["--model", "m", "--output_dir", "o", "--reward=x"]
    path.write_text(
        "prompts: [a.jsonl, b.jsonl]\neval_prompts: [one=a, two=b]\ntools: ['m:f', 'm:g']\n"
        "report_to:\n- wandb\n- tensorboard\n"
    )
    config = parse(P3OConfig, [str(path), *rest])
    assert (config.prompts, config.eval_prompts) == ("a.jsonl,b.jsonl", "one=a,two=b")
    assert (config.tools, config.report_to) == ("m:f,m:g", "wandb,tensorboard")
    path.write_text("reward: [m:f, org/model]\nprompts: p\n")
    assert parse(P3OConfig, [str(path), *rest[:-1]]).rewards == ["m:f", "org/model"]
    assert P3OConfig(reward=["m:f", "org/model"]).reward == "m:f,org/model"
    for wrong in ("[[a, b]]", "[{a: b}]", "{a: b}"):
        path.write_text(f"reward: {wrong}\n")
        assert "must give a single value for reward" in refusal(capsys, P3OConfig, str(path))
    with pytest.raises(UserError, match="--reward must be text, got "):
        P3OConfig(reward=[print])


def test_every_option_that_commas_separate_takes_a_list():
    found = set()
    for kind in (*CONFIGS, *OBJECTIVES.values(), EvaluateConfig, WinRateConfig, GenerateConfig):
        for flag in fields(kind):
            if "comma-separated" in flag.metadata["help"]:
                assert flag.metadata.get("python") is list, (kind, flag.name)
                found.add(flag.name)
    assert found >= {"reward", "prompts", "tools", "train_data", "vllm_url", "report_to", "models"}


def test_a_yaml_file_takes_lists_and_mappings_where_python_does(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(
        "chat_template_kwargs: {enable_thinking: false}\nreward_weights: [1, 0.2]\nreward: a:f,b:g\n"
    )
    rest = ["--model", "m", "--prompts", "p", "--output_dir", "o"]
    for begun in ([str(path), *rest], [*rest, "--config", str(path)], [f"--config={path}", *rest]):
        config = parse(P3OConfig, begun)
        assert config.weights == [1, 0.2]
        assert config.template_settings == {"enable_thinking": False}
    path.write_text("updates: [1, 2]\n")
    assert "must give a single value for updates" in refusal(capsys, P3OConfig, str(path), *rest)
    path.write_text("num_generations: 4\nmodle: m\n")
    line = refusal(capsys, P3OConfig, str(path))
    assert (
        "num_generations (TRL's num_generations is --responses_per_prompt here), modle (the nearest"
        in line
    )


def test_minibatches_yield_to_the_size_of_updates_unless_somebody_has_set_theirs():
    sizes = {4: 4, 12: 6, 7: 7, 32: 8}
    for total, size in sizes.items():
        assert P3OConfig(**GIVEN, prompts_per_update=total).prompts_per_minibatch == size
    with pytest.raises(UserError, match="must be a multiple of --prompts_per_minibatch"):
        P3OConfig(**GIVEN, prompts_per_update=12, prompts_per_minibatch=8)


class Red(ObjectiveConfig, objective="red"):
    """Trains red."""

    depth: int = option(1, "Depth of red.")


class Blue(ObjectiveConfig, objective="blue"):
    """Trains blue."""

    tone: str = option("sky", "Tone of blue.")


COLOURS = {"red": Red, "blue": Blue}


def test_the_objective_chooses_the_configuration(tmp_path):
    assert parse(Red, ["--objective", "red"]) == Red()
    assert parse_chosen(COLOURS, ["--depth", "-3", "--objective", "red"]) == Red(depth=-3)
    path = tmp_path / "run.yaml"
    path.write_text("objective: blue\ntone: sea\n")
    assert parse_chosen(COLOURS, [str(path), "--tone", "ink"]) == Blue(tone="ink")
    path.write_text("objective: blue\ndepth: 2\n")
    assert parse_chosen(COLOURS, [str(path), "--objective", "red"]) == Red(depth=2)
    path.write_text("depth: 2\n")
    assert parse_chosen(COLOURS, [str(path), "--objective", "red"]) == Red(depth=2)


@pytest.mark.parametrize(
    ("classes", "arguments", "message"),
    [
        (COLOURS, ["--depth", "1"], "--objective is missing: one of red, blue"),
        (COLOURS, ["--objective", "green"], "invalid choice: 'green'"),
        (COLOURS, ["--objective", "red", "--tone", "sea"], "unknown option --tone"),
        (COLOURS, ["missing.yaml", "--objective", "red"], "cannot read missing.yaml"),
        (
            {"red": Red, "blue": Red},
            ["--objective", "blue"],
            "--objective is red in these options, got 'blue'",
        ),
        (COLOURS, ["--help"], "blue           Trains blue."),
        (COLOURS, ["--objective", "blue", "--help"], "Tone of blue."),
    ],
)
def test_an_objective_is_refused_or_explained_by_its_name(capsys, classes, arguments, message):
    with pytest.raises(SystemExit) as ended:
        parse_chosen(classes, arguments)
    said = capsys.readouterr()
    assert message in (said.out if "--help" in arguments else said.err)
    assert ended.value.code == (0 if "--help" in arguments else 2)


def test_the_options_of_p3o_are_the_settings_of_its_loss():
    for setting in (
        one for one in fields(P3OSettings) if one.name != "sampler_ratio_cap"
    ):  # 0 in the trainer: none
        flag = P3OConfig.__dataclass_fields__[setting.name]
        assert flag.default == setting.default
        assert flag.metadata.get("choices") == CHOICES.get(setting.name)


def test_objectives_begin_with_the_responses_and_steps_of_their_papers():
    begins = {name: (4, {64: 1}) for name in ("rloo", "reinforce", "ppg")} | {
        "dapo": (8, {64: 16, 24: 8})
    }
    begins |= {"grpo": (8, {64: 1}), "dr_grpo": (8, {64: 1}), "gspo": (8, {64: 4, 5: 1})}
    begins |= {"cispo": (8, {64: 16}), "vespo": (8, {64: 8}), "sapo": (8, {64: 4})}
    for name, (responses, minibatches) in begins.items():
        for prompts, expected in minibatches.items():
            config = OBJECTIVES[name](**GIVEN, prompts_per_update=prompts)
            found = config.responses_per_prompt, config.inner_epochs, config.minibatches_per_update
            assert found == (responses, 1, expected), name


def test_a_missing_package_of_the_trainer_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with (
        pytest.raises(ImportError, match=r"needs yaml, .* pip install '\.\[trainer\]'"),
        naming_the_extra(),
    ):
        runpy.run_path(cli_file)
    with pytest.raises(ModuleNotFoundError), naming_the_extra():
        importlib.import_module("fastp3o.no_such_module")
    code = "import sys; sys.modules['accelerate'] = None; from fastp3o import train"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert re.search(
        r"fastp3o's trainer needs accelerate, .*'\.\[trainer\]'", ended.stderr.splitlines()[-1]
    )


@pytest.mark.parametrize(
    ("config", "name", "said"),
    [
        (P3OConfig, "epsilon", "TRL's epsilon is --clip_range here"),
        (GRPOConfig, "epsilon", "TRL's epsilon is --clip_low here"),
        (P3OConfig, "bf16", "TRL's bf16 is --precision bf16-autocast here"),
        (
            P3OConfig,
            "per_device_train_batch_size",
            "is --prompts_per_minibatch here, in prompts: its value × devices × "
            "gradient_accumulation_steps / num_generations",
        ),
        (
            SFTConfig,
            "per_device_train_batch_size",
            "is --batch_size here, over all devices: its value × devices × "
            "gradient_accumulation_steps",
        ),
        (
            P3OConfig,
            "generation_batch_size",
            "is --prompts_per_update here, in prompts: its value / num_generations",
        ),
        (
            P3OConfig,
            "gradient_accumulation_steps",
            "TRL's gradient_accumulation_steps is --prompts_per_minibatch here, of which it is a",
        ),
        (SFTConfig, "gradient_accumulation_steps", "is --batch_size here, of which it is a factor"),
        (P3OConfig, "packing", "TRL's packing is not needed here: rows are always packed"),
        (P3OConfig, "vllm_mode", "TRL's vllm_mode is no option here: with sampler vllm, servers"),
        (SFTConfig, "use_vllm", "unknown option"),
        (P3OConfig, "update", "the nearest one is --updates"),
        (P3OConfig, "lr", "the nearest one is --learning_rate"),
        (SFTConfig, "num_generations", "unknown option"),
    ],
)
def test_trls_names_are_hints_in_commands_and_in_python(config, name, said, capsys):
    complete = [f"--{flag.name}=x" for flag in fields(config) if flag.metadata.get("required")]
    with pytest.raises(SystemExit):
        parse(config, [*complete, f"--{name}=1"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert said in line
    with pytest.raises(TypeError) as refused:
        config(**{name: 1})
    expected = said.replace("--", "").replace(
        "unknown option", f"{config.__name__} has no option {name}"
    )
    assert expected in str(refused.value)
    assert ("TRL's" in line) == ("nearest" not in said and said != "unknown option")


def test_every_hint_names_an_option_that_there_is():
    options = {flag.name for kind in CONFIGS for flag in fields(kind)}
    for name, choices in trl_names().items():
        assert all(
            choice.split()[0].rstrip(",") in options or ":" in choice.partition(",")[0]
            for choice in choices
        ), name
        assert hint(name, options) or name in options, name
    assert hint("nosuch", options) == ""


def test_python_names_all_unknown_options_at_once_as_commands_do(capsys):
    with pytest.raises(TypeError) as refused:
        P3OConfig(beta=0.1, odd=1, num_generations=4)
    said = "beta (TRL's beta is {0}kl_coef here), {0}odd, {0}num_generations (TRL's "
    said += "num_generations is {0}responses_per_prompt here)"
    assert str(refused.value) == f"P3OConfig has no option {said.format('')}"
    line = refusal(capsys, P3OConfig, "--beta=1", "--odd=1", "--num_generations=4")
    assert line.endswith("unknown options " + "--" + said.format("--"))


@pytest.mark.parametrize("name", ["kl_coef", "beta", "entropy_coef"])
def test_a_function_s_options_say_that_it_names_what_it_reads(name, capsys):
    tensor = "entropy" if name == "entropy_coef" else "ref or ref_tokens"
    said = f"{name}; name {tensor} as a parameter of the function"
    with pytest.raises(TypeError, match=f"^FunctionConfig has no option {said}"):
        FunctionConfig(**{name: 0.1})
    assert f"unknown option --{said}" in refusal(capsys, FunctionConfig, f"--{name}=1")
