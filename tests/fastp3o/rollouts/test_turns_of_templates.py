"""Trajectories are the chat template's text of the whole conversation: with its variables, at the
run's time, in every turn; or the template is refused.
"""

import json
from datetime import datetime
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from fastp3o import UserError, train
from fastp3o.data.encoding import Encoder
from fastp3o.data.errors import DataError
from fastp3o.data.layouts import Part
from fastp3o.data.loading import load_prompts
from fastp3o.generate.config import GenerateConfig
from fastp3o.generate.loop import generate
from fastp3o.rollouts.turns.observation import chat_observations
from fastp3o.runtime.clock import Clock
from tests.fastp3o.data.test_loading import jsonl
from tests.fastp3o.families import CHATML, QWEN_TOKENS, WITH_TEMPLATE, Family, save_family
from tests.fastp3o.rollouts.environments import games

BEGINS = "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
QWEN = ("<|im_end|>", "<|endoftext|>", None, QWEN_TOKENS, ("<|im_end|>",))
# Their templates keep what they have begun a reply with: an empty thought, or the beginning of one.
BEGUN = Family(
    "begins_after_a_thought", CHATML.removesuffix("{% endif %}") + BEGINS + "{% endif %}", *QWEN
)
BEGINS_THOUGHT = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
THINKS = Family("begins_a_thought", "{{ tools | tojson if tools }}" + BEGINS_THOUGHT, *QWEN)
FAMILIES = [*WITH_TEMPLATE, BEGUN, THINKS]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"x": {}}}}]
VARIABLES = [
    {},
    {"enable_thinking": False},
    {"enable_thinking": True},
    {"reasoning_effort": "high"},
    {"date_string": "1 May"},
    {"tools": TOOLS},
]
READ = [
    (family, one)
    for family in FAMILIES
    for one in VARIABLES
    if all(name in str(family.template) for name in one)
]
NOON = datetime(2020, 2, 29, 12, 30)
OBSERVED = ["4", " 4\n", 'say "a\\nb"\nnow', "<|im_end|> <|eot_id|> <end_of_turn>", "<think> 100%"]
# Of the small ones; their templates write a reply otherwise once others follow it, or end it where
# none stops.
REFUSED = {
    *(("qwen3", "user", number) for number in range(6)),
    ("qwen3", "tool", 1),  # it leaves an empty thought out
    *(
        (name, role, number)
        for name in ("llama2", "gptoss", "qwen_base")
        for role in ("user", "tool")
        for number in range(6)
    ),
    *(("gemma3", "tool", number) for number in range(6)),
}


tokenizer_of = cache(Family.tokenizer)


class Noon(datetime):
    @classmethod
    def now(cls, tz=None):
        return NOON


def written_at_noon(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **variables) -> str:
    """By transformers, whose templates read this module's clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template_utils, "datetime", Noon)
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **variables
        )


def conversation(role: str, replies: list[str]) -> list[dict]:
    asked, roles = [{"role": "user", "content": "What is 2+2?"}], ("assistant", role)
    turns = zip(replies, OBSERVED[: len(replies)], strict=True)
    return asked + [
        {"role": one, "content": text}
        for both in turns
        for one, text in zip(roles, both, strict=True)
    ]


@pytest.mark.parametrize(("family", "variables"), READ, ids=str)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_trajectory_is_the_templates_text_of_the_conversation_or_refused(family, role, variables):
    """Variables of a record, which tools always are, and of the run."""
    tokenizer = tokenizer_of(family)
    thought = "" if variables.get("enable_thinking") is False else "<think>\nhm\n</think>\n\n"
    begun = {BEGUN: "<think>\n\n</think>\n\n", THINKS: "<think>\n"}.get(family, "")
    begun = "" if family is BEGUN and thought else begun
    turns = [thought.removeprefix(begun) + f"turn {number}" for number in range(len(OBSERVED))]
    expected = None
    if (family.name.removesuffix("-published"), role, VARIABLES.index(variables)) not in REFUSED:
        expected = written_at_noon(
            tokenizer, conversation(role, [begun + turn for turn in turns]), **variables
        )
    of_record = {"tools": TOOLS} if "tools" in variables else {"chat_template_kwargs": variables}
    for settings, fields in [({}, of_record)] + ([] if "tools" in variables else [(variables, {})]):
        if expected is None:
            with pytest.raises(UserError, match="the chat template of"):
                trajectory(tokenizer, family, role, settings, fields, turns)
            continue
        text = tokenizer.decode(trajectory(tokenizer, family, role, settings, fields, turns))
        if family.dummy_prefix:  # which a tokenizer's decoder may leave behind special tokens
            text, expected = text.replace(" ", ""), expected.replace(" ", "")
        assert text == expected


def trajectory(
    tokenizer, family: Family, role: str, settings: dict, fields: dict, turns: list[str]
) -> list[int]:
    """The ids of a trajectory of these turns. Raises UserError if the template is refused."""
    asked, clock = conversation(role, []), Clock(NOON)
    ends = {*family.end_ids(tokenizer), tokenizer.eos_token_id}
    observe = chat_observations(tokenizer, role, ends, settings, clock)
    encoder = Encoder(tokenizer, 2000, None, chat_template_kwargs=settings, clock=clock)
    (prompt,) = encoder.encode([encoder.render(Part("prompt", asked), (), fields)])
    given, ids = json.dumps({"prompt": asked} | fields), list(prompt.prompt_ids)
    for turn, observed in zip(turns, OBSERVED, strict=True):
        ids += tokenizer(turn, add_special_tokens=False, split_special_tokens=True).input_ids
        ids += observe(observed, -1, given)
    return ids


def test_a_record_whose_variables_change_earlier_replies_is_named_when_it_is_read(tmp_path: Path):
    tokenizer = next(family for family in FAMILIES if family.name == "qwen3").tokenizer()
    asked = {"prompt": [{"role": "user", "content": "Hi"}]}
    source = jsonl(tmp_path, [asked, asked | {"chat_template_kwargs": {"enable_thinking": False}}])
    options = {"max_prompt_tokens": 99, "observation_role": "tool"}
    with pytest.raises(
        DataError,
        match="record 2: expected a chat template that leaves a reply as it is once a message",
    ):
        load_prompts(source, tokenizer, **options)
    prompts, report = load_prompts(source, tokenizer, skip_bad_records=True, **options)
    assert (len(prompts), report.skipped) == (1, 1)


def asked(number: int) -> dict:
    record = {"prompt": [{"role": "user", "content": f"say {number}"}]}
    return record | ({"chat_template_kwargs": {"enable_thinking": False}} if number % 2 else {})


class Again:
    def reset(self):
        """Each begins with its prompt."""

    def step(self, text):
        return "again", 1.0, False


@pytest.mark.parametrize("sampler", ["engine", "transformers"])
def test_every_turn_of_a_run_begins_with_its_records_variables(
    tmp_path: Path, monkeypatch, sampler: str
):
    """Of rollouts and of evaluations."""
    monkeypatch.chdir(tmp_path)
    model, tokenizer = save_family(BEGUN, tmp_path / "model")
    seen: list[tuple[str, str]] = []

    def reward(prompts, responses, completion_ids):
        seen.extend(zip(prompts, map(tokenizer.decode, completion_ids), strict=True))
        return [float(len(ids)) for ids in completion_ids]

    more = {"observation_role": "user", "stop_strings": [chr(number) for number in range(32, 127)]}
    more |= {"updates": 1, "max_prompt_tokens": 99, "max_response_tokens": 200, "sampler": sampler}
    records = [asked(number) for number in range(8)]
    train(
        games(model, "run", **more),
        prompts=records,
        eval_prompts=records,
        reward=reward,
        environment=Again,
    )
    turns = [(prompt, text) for prompt, text in seen if "again" in text]
    assert len(turns) > 16
    for prompt, text in turns:
        for begun in text.split("again<|im_end|>\n<|im_start|>assistant\n")[1:]:
            assert begun.startswith("<think>\n\n</think>\n\n") == prompt.endswith(
                "<think>\n\n</think>\n\n"
            )
    assert {prompt.endswith("</think>\n\n") for prompt, _ in turns} == {True, False}


def test_revisions_have_their_records_variables(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, _ = save_family(BEGUN, tmp_path / "model")
    Path("principles.txt").write_text("Be kind.\n")
    source, stops = (
        jsonl(tmp_path, [asked(number) for number in range(4)]),
        [chr(n) for n in range(32, 127)],
    )
    settings = {
        "principles": "principles.txt",
        "keep": "revised",
        "stop_strings": stops,
        "max_prompt_tokens": 99,
    }
    generate(
        GenerateConfig(
            model=model, prompts=source, output_dir="run", max_response_tokens=8, **settings
        )
    )
    lines = [json.loads(line) for line in Path("run/samples.jsonl").read_text().splitlines()]
    assert any(len(turns) > 1 for line in lines for turns in line["turns"])
    for line in lines:
        for text, turns in zip(line["responses"], line["turns"], strict=True):
            assert text.count("<think>") == (line["number"] % 2) * (len(turns) - 1)
