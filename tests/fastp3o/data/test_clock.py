"""The clock of chat templates stands still for a run: its first start's, whatever the day of what
comes later.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from transformers.utils import chat_template_utils

from fastp3o import train
from fastp3o.config import StageConfig
from fastp3o.data.encoding import ChatTemplate
from fastp3o.data.loading import load_prompts
from fastp3o.generate.config import GenerateConfig
from fastp3o.generate.loop import generate
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.run.manifest import Manifest, content_checksum, first_start, read_manifest
from fastp3o.runtime.clock import Clock
from fastp3o.training.config import RewardModelConfig, SFTConfig
from tests.fastp3o.data.test_loading import jsonl
from tests.fastp3o.families import WITH_TEMPLATE, Family, every_chat_family, save_family
from tests.fastp3o.runs import copy_at_save_before

EVENING, MORNING = datetime(2026, 2, 28, 23, 59, 7), datetime(2026, 3, 1, 0, 10)
ASKED = [{"role": "user", "content": "Hi"}]
GPT_OSS, LLAMA3 = (
    next(one for one in WITH_TEMPLATE if one.name == name) for name in ("gptoss", "llama3_1")
)


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[datetime], None]:
    """Sets what transformers' templates read."""

    def to(moment: datetime) -> None:
        class Then(datetime):
            @classmethod
            def now(cls, tz=None):
                return moment

        monkeypatch.setattr(chat_template_utils, "datetime", Then)

    return to


FORMATS = [
    "%d %B %Y",
    "%-d/%e %H:%M:%S.%f %%x %%%d%% %j %p %I 100% of it",
    "%a, %A %b %c %x %X %n|%t| é' \" {{ 3 }} {% if %}",
    "%U %W %G-%V %u %C %D %F %T %R %y %Z%z.",
    "",
    "no directive",
]


@pytest.mark.parametrize("written", FORMATS)
def test_a_clock_writes_what_that_of_transformers_would(set_clock, written: str):
    tokenizer = GPT_OSS.tokenizer()
    tokenizer.chat_template = (
        "{% if strftime_now is defined %}{% set day = strftime_now(wanted) %}{% endif %}"
        "{%- macro again(wanted) %}[{{ strftime_now(wanted) }}]{% endmacro %}{{ day }}{{ again(wanted) }}"
    )
    set_clock(EVENING)
    expected = tokenizer.apply_chat_template(ASKED, tokenize=False, wanted=written)
    set_clock(MORNING)
    template = ChatTemplate(tokenizer, clock=Clock(EVENING))
    assert template.apply(ASKED, "", {"wanted": written}, add_generation_prompt=False) == expected


@every_chat_family
def test_midnight_changes_no_data_and_templates_that_read_the_clock_are_told(
    tmp_path, set_clock, family: Family
):
    tokenizer, records = family.tokenizer(), [{"prompt": ASKED}]
    source, options = jsonl(tmp_path, records), {"max_prompt_tokens": 200}
    set_clock(EVENING)
    plain = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    set_clock(MORNING)
    changed = (
        tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True) != plain
    )
    evening, report = load_prompts(source, tokenizer, clock=Clock(EVENING), **options)
    assert evening["prompt"] == [plain]
    assert (
        ("; the chat template reads the time, 2026-02-28 23:59" in str(report))
        == changed
        == bool(report.clock)
    )
    # Without a run's clock, the process's: two calls agree, whatever the time of each.
    first, _ = load_prompts(source, tokenizer, **options)
    set_clock(EVENING)
    second, _ = load_prompts(source, tokenizer, **options)
    assert first._fingerprint == second._fingerprint


def test_a_template_that_is_told_the_date_does_not_read_the_clock():
    tokenizer = next(family for family in WITH_TEMPLATE if family.name == "llama3_1").tokenizer()
    assert ChatTemplate(tokenizer).reads_clock
    assert not ChatTemplate(tokenizer, {"date_string": "1 May"}).reads_clock


SIZES = {
    "max_prompt_tokens": 200,
    "max_response_tokens": 60,
    "learning_rate": 1e-4,
    "save_minutes": 1e-9,
}
ONLINE = {
    "updates": 2,
    "prompts_per_update": 2,
    "prompts_per_minibatch": 2,
    "reward": "rewards_for_tests:vowels",
}
STAGES: dict[str, Callable[..., StageConfig]] = {
    "p3o": lambda **more: P3OConfig(
        prompts="prompts.jsonl", eval_prompts="prompts.jsonl", **ONLINE, **more
    ),
    "sft": lambda **more: SFTConfig(train_data="pairs.jsonl", epochs=2, batch_size=2, **more),
    "reward": lambda **more: RewardModelConfig(
        train_data="pairs.jsonl", epochs=2, batch_size=2, **more
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_goes_on_after_midnight_with_the_clock_of_its_first_start(
    workplace, set_clock, capsys, stage: str
):
    model, _ = save_family(GPT_OSS, Path("model"))
    records = [{"prompt": [{"role": "user", "content": f"say {number}"}]} for number in range(2)]
    reply = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    jsonl(Path(), records, "prompts.jsonl")
    jsonl(Path(), [record | reply for record in records], "pairs.jsonl")
    config = STAGES[stage](model=model, output_dir="run", **SIZES)
    set_clock(EVENING)
    train(config)
    copy_at_save_before("run", "again")
    set_clock(MORNING)
    train(replace(config, output_dir="again", resume=True))
    assert "reads the time, 2026-02-28 23:59" in capsys.readouterr().out.split("resuming")[-2]
    for folder in ("run", "again"):
        for state in (Path(folder) / "state").iterdir():
            assert read_manifest(state).begun == EVENING.isoformat()
    assert Path("run/metrics.jsonl").read_text().count("\n") == Path(
        "again/metrics.jsonl"
    ).read_text().count("\n")
    # A new run of the same seed has another day, and says which.
    train(replace(config, output_dir="other"))
    assert "reads the time, 2026-03-01 00:10" in capsys.readouterr().out


def test_generation_goes_on_after_midnight(workplace, set_clock):
    model, _ = save_family(LLAMA3, Path("model"))
    jsonl(
        Path(),
        [{"prompt": [{"role": "user", "content": f"say {number}"}]} for number in range(4)],
        "asked.jsonl",
    )
    settings = {
        "model": model,
        "prompts": "asked.jsonl",
        "output_dir": "run",
        "keep": "all",
        "keep_unfinished": True,
    }
    settings |= {
        "reward": "rewards_for_tests:vowels",
        "rollout_batch_size": 2,
        "max_response_tokens": 1,
    }
    config = GenerateConfig(**settings, max_prompt_tokens=200)
    set_clock(EVENING)
    generate(config)
    whole = Path("run/samples.jsonl").read_text()
    Path("run/samples.jsonl").write_text("".join(whole.splitlines(keepends=True)[:2]))
    set_clock(MORNING)
    generate(replace(config, resume=True))
    assert Path("run/samples.jsonl").read_text() == whole


def test_the_first_start_is_that_of_any_state_that_can_be_read(tmp_path: Path, set_clock):
    set_clock(MORNING)
    assert first_start([]).moment == first_start([tmp_path]).moment == MORNING
    for name, begun in (("old", ""), ("whole", EVENING.isoformat())):
        (tmp_path / name).mkdir()
        Manifest(1, False, 1, {}, {}, {}, begun).write(tmp_path / name)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    assert (
        first_start([tmp_path / "broken", tmp_path / "old", tmp_path / "whole"]).moment == EVENING
    )
    # A state of an older version has no time, and is whole.
    path = tmp_path / "old" / "manifest.json"
    content = {
        name: value
        for name, value in json.loads(path.read_text()).items()
        if name not in ("begun", "sha256")
    }
    path.write_text(json.dumps({**content, "sha256": content_checksum(content)}))
    assert read_manifest(tmp_path / "old").begun == ""
    assert first_start([tmp_path / "old"]).moment == MORNING
