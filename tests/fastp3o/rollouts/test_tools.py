"""Functions as tools: their schemas reach the chat template, calls are read as it writes them, and
answered.
"""

import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from fastp3o import UserError, train
from fastp3o.__main__ import main
from fastp3o.data.errors import DataError
from fastp3o.data.loading import load_prompts
from fastp3o.evaluation.config import EvaluateConfig
from fastp3o.generate.config import GenerateConfig
from fastp3o.generate.loop import generate
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.rollouts.turns.calls import Call, call_reader
from fastp3o.rollouts.turns.environment import Environments
from fastp3o.rollouts.turns.tools import load_tools, make_tool, tool_environment
from fastp3o.run.log import read_updates
from fastp3o.sources import InMemory
from tests.fastp3o.data.test_loading import jsonl
from tests.fastp3o.families import CHATML, QWEN_TOKENS, Family, save_family, small_tokenizer
from tests.fastp3o.runs import assert_equal, assert_resumes, config, metrics, weights

FUNCTIONS = '''
"""Tools, and a reward that counts their answers."""


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def search(query: str, limit: int = 1) -> str:
    """Searches.

    Args:
        query: What for.
        limit: How many.
    """
    return "no" if limit > 1 else query.upper()


def answers(prompts, responses):
    return [response.count("3") + response.count("CAT") / 2 for response in responses]
'''
# A model of this vocabulary calls in most of its turns.
CALLS = [
    ("add", {"a": 1, "b": 2}),
    ("search", {"query": "cat"}),
    ("add", {"a": 1}),
    ("sub", {}),
] * 40
CALLS += [("multiply", {"a": 100, "b": 100})] * 40
RESPONSE_TEMPLATE = {
    "start_anchor": "assistant\n",
    "fields": {
        "content": {"close": "<|im_end|>"},
        "tool_calls": {
            "open_pattern": r"<\|call\|>(?P<name>\w+)(?P<number> \d+)",
            "close": "<|called|>",
            "repeats": True,
            "content": "json",
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


def hermes(number: int, name: str, arguments: dict) -> str:
    call = json.dumps({"name": name, "arguments": arguments, "number": number})
    return f"<tool_call>{call}</tool_call>"


def templates(number: int, name: str, arguments: dict) -> str:
    return f"<|call|>{name} {number}{json.dumps(arguments)}<|called|>"


def family(written: Callable[[int, str, dict], str], response_template: dict | None) -> Family:
    """Chats with tools. Each call is a token, at which the policy stops; those of the response
    template are special.
    """
    calls = tuple(written(number, *call) for number, call in enumerate(CALLS))
    template = "{{ tools | tojson if tools }}" + CHATML
    special = (*QWEN_TOKENS, "<|call|>", "<|called|>")
    ends = ("<|im_end|>", *calls)

    def tokenizer() -> PreTrainedTokenizerBase:
        plain = Family("calls", template, "<|im_end|>", "<|endoftext|>", None, special, ends)
        made = small_tokenizer(plain)
        made.add_tokens([*calls], special_tokens=response_template is not None)
        made.response_template = response_template
        return made

    return Family(
        "calls", template, "<|im_end|>", "<|endoftext|>", None, special, ends, make=tokenizer
    )


READS = family(templates, RESPONSE_TEMPLATE).tokenizer()
FAMILIES = {
    "hermes": family(hermes, None),
    "response_template": family(templates, RESPONSE_TEMPLATE),
}


@pytest.fixture
def tools(workplace) -> Path:
    (workplace / "games.py").write_text(FUNCTIONS)
    messages = [[{"role": "user", "content": f"say {number}"}] for number in range(8)]
    jsonl(workplace, [{"prompt": one} for one in messages], "prompts.jsonl")
    return workplace


@pytest.fixture
def functions(tools) -> dict:
    """Of the module as the command imports it."""
    sys.path.insert(0, str(tools))
    try:
        return vars(__import__("games"))
    finally:
        sys.path.remove(str(tools))


def with_tools(name: str, folder: str, **changes) -> P3OConfig:
    if not Path(name).exists():
        save_family(FAMILIES[name], Path(name), max_position_embeddings=2048)
    settings = {
        "max_turns": 3,
        "max_turn_tokens": 8,
        "max_response_tokens": 150,
        "max_prompt_tokens": 1500,
    }
    settings |= {"reward": "games:answers", "updates": 3, "tokens_per_row": 8192}
    return config(name, folder, **settings | changes)


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_functions_in_python_and_their_names_in_the_command_are_one_run(
    tools, functions, monkeypatch, name
):
    train(with_tools(name, "python"), tools=[functions["add"], functions["search"]])
    for folder, flags in {"file": [], "flag": ["--tools", "games:add, games:search"]}.items():
        arguments = ["--config", "python/config.yaml", "--output_dir", folder, *flags]
        monkeypatch.setattr(sys, "argv", ["fastp3o", "p3o", *arguments])
        main()
        assert metrics("python") == metrics(folder)
        assert_equal(weights("python"), weights(folder))
    for line in metrics("python"):
        assert line["tool_calls"] > line["failed_tool_calls"] > 0
        assert line["turns"] > 1
        assert line["reward"] > 0
    texts = [
        r.text
        for groups in read_updates(Path("python/rollouts.jsonl"))
        for g in groups
        for r in g.responses
    ]
    for answer in (
        "tool\n3\n",
        "tool\nCAT\n",
        "tool\nerror: TypeError: ",
        "tool\nerror: there is no tool 'sub'",
    ):
        assert any(answer in text for text in texts), answer
    (prompt, *_) = (
        g.prompt for groups in read_updates(Path("python/rollouts.jsonl")) for g in groups
    )
    schemas = [make_tool(functions[one]).schema for one in ("add", "search")]
    assert json.loads(str(prompt).partition("<|im_start|>")[0]) == schemas


def test_the_page_begins_with_an_example_that_runs(tools):
    page = (Path(__file__).parents[3] / "fastp3o" / "rollouts" / "tools.md").read_text()
    title, code, *_ = page.split("```")
    assert title == "# Tools\n\n"
    save_family(FAMILIES["hermes"], Path("start"), max_position_embeddings=4096)
    small = (
        code.removeprefix("python")
        .replace("Qwen/Qwen3-0.6B", "start")
        .replace("Config(", "Config(updates=1, ")
    )
    exec(compile(small, "tools.md", "exec"), {"__name__": "__main__"})
    texts = [
        r.text
        for groups in read_updates(Path("runs/tools/rollouts.jsonl"))
        for g in groups
        for r in g.responses
    ]
    assert any("tool\n10000\n" in text for text in texts)
    assert metrics("runs/tools")[0]["tool_calls"] > 0


def test_a_run_resumes_to_the_bit_and_says_that_a_tool_has_changed(tools, functions, capsys):
    given = with_tools("hermes", "run", tools="games:add,games:search", save_minutes=1e-9)
    train(given)
    assert_resumes(given)
    (tools / "games.py").write_text(FUNCTIONS + "\n")
    capsys.readouterr()
    train(replace(given, resume=True, updates=3), tools=[functions["add"], functions["search"]])
    printed = capsys.readouterr().out
    for name in ("add", "search"):
        assert f"resuming with another source of the tools games:{name} function" in printed
    with pytest.raises(
        UserError, match=r"--tools \(games:add,games:search before, games:add now\)"
    ):
        train(replace(given, resume=True, tools="games:add"))


@pytest.mark.parametrize("sampler", ["engine", "transformers"])
def test_generate_samples_turns_of_tools_and_keeps_the_tools_of_its_prompts(
    tools, functions, sampler
):
    save_family(FAMILIES["response_template"], Path("start"), max_position_embeddings=2048)
    limits = {
        "max_prompt_tokens": 1500,
        "max_turn_tokens": 8,
        "max_response_tokens": 150,
        "responses_per_prompt": 2,
    }
    options = limits | {"keep": "none", "tools": "games:add,games:search", "sampler": sampler}
    generate(GenerateConfig(model="start", prompts="prompts.jsonl", output_dir="run", **options))
    lines = [json.loads(line) for line in Path("run/samples.jsonl").read_text().splitlines()]
    schemas = [make_tool(functions[name]).schema for name in ("add", "search")]
    assert [line["template_fields"]["tools"] for line in lines] == [schemas] * 8
    texts = [text for line in lines for text in line["responses"]]
    assert any("tool\n3\n" in text for text in texts)
    assert any("tool\nCAT\n" in text for text in texts)


# --- prompts --------------------------------------------------------------------------------------


def load(folder: Path, tokenizer: PreTrainedTokenizerBase, record: dict, **options):
    settings = {
        "max_prompt_tokens": 2000,
        "tools": [make_tool(vars_of(FUNCTIONS)["add"]).schema],
        "observation_role": "tool",
        "as_given": True,
    }
    return load_prompts(jsonl(folder, [record]), tokenizer, **settings | options)


def vars_of(source: str) -> dict:
    names: dict = {}
    exec(source, names)
    return names


def test_messages_have_the_runs_tools_and_none_of_their_own(tmp_path):
    tokenizer, chat = (
        FAMILIES["hermes"].tokenizer(),
        {"prompt": [{"role": "user", "content": "Hi"}]},
    )
    schema = make_tool(vars_of(FUNCTIONS)["add"]).schema
    for record in (chat, chat | {"tools": None}, chat | {"tools": []}):
        prompts, _ = load(tmp_path, tokenizer, record)
        assert prompts[0]["prompt"] == tokenizer.apply_chat_template(
            chat["prompt"], tools=[schema], tokenize=False, add_generation_prompt=True
        )
        assert json.loads(prompts[0]["given"])["tools"] == [schema]
    with pytest.raises(
        DataError, match="'tools': expected none, since only the run's --tools are answered"
    ):
        load(tmp_path, tokenizer, chat | {"tools": [{"type": "function"}]})
    with pytest.raises(
        DataError,
        match="record 1: the prompt is text, and only a chat template tells the policy of",
    ):
        load(tmp_path, tokenizer, {"prompt": "Hi"})
    prompts, _ = load(tmp_path, tokenizer, {"prompt": "Hi"}, observation_role=None)
    assert prompts[0]["prompt"] == "Hi"
    tokenizer.chat_template = CHATML
    with pytest.raises(
        DataError,
        match="the chat template does not read `tools`: --chat_template names one that does",
    ):
        load(tmp_path, tokenizer, chat)


# --- calls ----------------------------------------------------------------------------------------


def read(
    tokenizer: PreTrainedTokenizerBase, turn: str, before: str = "<|im_start|>assistant\n"
) -> list[Call]:
    schemas = [make_tool(vars_of(FUNCTIONS)["add"]).schema]
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in (before, turn)]
    return call_reader(tokenizer, schemas)(*ids)


XML = {
    "start_anchor": "assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {"close": "<|im_end|>"},
        "tool_calls": {
            "open_pattern": r"<\|call\|>(?P<name>\w+)",
            "close": "<|called|>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\1>"},
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
    },
}


def test_calls_are_those_of_the_response_template_with_arguments_of_their_types():
    tokenizer = FAMILIES["hermes"].tokenizer()
    tokenizer.response_template = XML
    call = "<|call|>add<a>1</a><b>2</b><|called|>"
    assert read(tokenizer, f"Well.{call}{call}<|im_end|>") == [Call("add", {"a": 1, "b": 2})] * 2
    assert read(tokenizer, "The sum is 3.<|im_end|>") == []
    # What the policy thinks is no call, be it the template that begins the thought; nor is one that
    # Hermes would write.
    assert read(tokenizer, f"{call}</think>3", "assistant\n<think>") == []
    assert read(tokenizer, '<tool_call>{"name": "add", "arguments": {}}</tool_call>') == []
    # Only the last reply begins where the template says.
    assert read(
        tokenizer, call, f"<|im_start|>assistant\n{call}<|im_end|>\n<|im_start|>assistant\n"
    ) == [Call("add", {"a": 1, "b": 2})]


@pytest.mark.parametrize(
    ("turn", "what"),
    [
        ("<|call|>add 1{<|called|>", "the calls of this turn cannot be read: json"),
        ("<|call|>add 1[1]<|called|>", "the calls of this turn cannot be read: the name is text"),
        ("<|call|>add 1" + "[" * 5000 + "<|called|>", "the calls of this turn cannot be read"),
    ],
)
def test_a_turn_that_the_response_template_cannot_read_is_one_call_with_an_error(turn, what):
    tokenizer = FAMILIES["response_template"].tokenizer()
    (call,) = read(tokenizer, turn)
    assert call.error.startswith(what)


PIECES = [
    "<|call|>",
    "<|called|>",
    "add",
    " 1",
    "{",
    "}",
    '"a": 1',
    "[",
    "<a>1</a>",
    "<tool_call>",
    "</think>",
]
TURNS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join)


@settings(max_examples=200, deadline=None, database=None)
@given(TURNS, st.sampled_from([XML, RESPONSE_TEMPLATE]))
def test_whatever_a_policy_writes_is_read_and_answered(turn, response_template):
    READS.response_template = response_template
    environments = Environments("tools", tool_environment([make_tool(vars_of(FUNCTIONS)["add"])]))
    made, _ = environments.begin([{}])
    (step,) = environments.step(made, [read(READS, turn)])
    assert not step.failure
    assert step.done == (not step.rewards["tool_calls"])
    assert step.observation.count("error: ") >= step.rewards["failed_tool_calls"]


@pytest.mark.parametrize(
    "piece", ["<|call|>", "<|call|>add 1{}<|called|>", "<|called|>", "[", "<think>"]
)
def test_time_to_read_grows_with_the_turn_alone(piece):
    READS.response_template = RESPONSE_TEMPLATE
    began = time.process_time()
    read(READS, piece * 5000)
    assert time.process_time() - began < 10


def test_without_a_response_template_for_calls_they_are_hermess():
    tokenizer = FAMILIES["hermes"].tokenizer()
    turn = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><tool_call>{</tool_call><|im_end|>'
    for template in (None, {"start_anchor": "assistant\n", "fields": {"content": {}}}):
        tokenizer.response_template = template
        first, second = read(tokenizer, turn)
        assert first == Call("add", {"a": 1})
        assert second.error.startswith("a call is a JSON object")
    # Some have the marks as special tokens, which no text shows.
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=True)
    assert read(tokenizer, turn)[0] == Call("add", {"a": 1})


def test_a_response_template_that_is_none_is_named():
    tokenizer = FAMILIES["hermes"].tokenizer()
    tokenizer.response_template, tokenizer.name_or_path = (
        {"fields": {"tool_calls": {}}},
        "some/model",
    )
    with pytest.raises(
        UserError, match=r"the response template of some/model is refused: .*start_anchor"
    ):
        call_reader(tokenizer, [])


# --- refusals -------------------------------------------------------------------------------------


def undescribed(a: int) -> int:
    """Has an argument that no line describes."""
    return a


def unhinted(a):
    """Has no types.

    Args:
        a: what
    """


def silent(a: int) -> int:
    return a


def several(*numbers: int) -> int:
    """Adds.

    Args:
        numbers: what
    """
    return sum(numbers)


def echo(text: str) -> str:
    """Says it.

    Args:
        text: what
    """
    return text


class Called:
    def __call__(self, text: str) -> str:
        """Says it."""
        return text


NO_FUNCTION = "a tool must be a function with a name, which `def` gives it, got"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            [silent],
            "silent: .*no docstring.*a tool needs type hints, and a docstring that describes its arguments",
        ),
        ([unhinted], "unhinted: Argument a is missing a type hint"),
        ([undescribed], "undescribed: .*no description for the argument 'a'"),
        ([several], "several: a call gives arguments by name, and numbers has none"),
        ([lambda text: text], NO_FUNCTION),
        ([Called()], NO_FUNCTION),
        ([Called], NO_FUNCTION),
        ([functools.partial(echo, text="a")], NO_FUNCTION),
        ([3], f"{NO_FUNCTION} 3"),
        ([echo, echo], "two tools have the name 'echo'"),
        ([], "tools is an empty list"),
        (echo, r"tools must be a list: tools=\[echo\]$"),
        (3, "tools must be a list of functions or what tools takes, got a int"),
        (["add"], "functions in a list, or one text tools=\"module:add\", got 'add' in a list"),
        (["games:add"], "or one text tools=\"games:add\", got 'games:add' in a list"),
        ("games:ad", "cannot load the tool 'games:ad': .*the nearest one is add"),
        ("games", "the tool must be given as module:function, got 'games'"),
        ("games:add,", "the tool must be given as module:function, got ''"),
        ("games:add,games:add", "two tools have the name 'add'"),
        ("games:FIVE", "cannot load the tool 'games:FIVE': it is a int, not a function"),
    ],
    ids=lambda value: value if isinstance(value, str) else "functions",
)
def test_what_cannot_be_a_tool_is_named_before_the_run(tools, monkeypatch, given, message):
    monkeypatch.setattr(UserError, "names_flags", False)
    (tools / "games.py").write_text(FUNCTIONS + "\nFIVE = 5\n")
    with pytest.raises(UserError, match=message):
        train(with_tools("hermes", "run"), tools=given)
    assert not Path("run").exists()


def test_tools_may_be_methods_and_cached_functions():
    class Index:
        def find(self, text: str) -> str:
            """Finds it.

            Args:
                text: what
            """
            return text

    found, cached = load_tools(InMemory("two", [Index().find, functools.lru_cache(echo)]))
    assert (found.name, cached.name) == ("find", "echo")
    assert [*found.schema["function"]["parameters"]["properties"]] == ["text"]


def test_tools_and_an_environment_or_what_says_nothing_of_calls_are_refused(tools):
    for changes, message in (
        ({"environment": "games:Guess"}, "--tools and --environment cannot be combined"),
        (
            {"reward": "environment"},
            "--reward environment needs an --environment that gives it; --tools give none",
        ),
    ):
        with pytest.raises(UserError, match=message):
            with_tools("hermes", "run", tools="games:add", **changes)
    with pytest.raises(
        UserError, match="--keep all would train on what the --tools say: give --keep none"
    ):
        GenerateConfig(
            model="m", prompts="p", output_dir="o", reward="a:b", keep="all", tools="games:add"
        )
    with pytest.raises(
        UserError, match="--max_turns has no effect without --environment or --tools"
    ):
        EvaluateConfig(model="m", prompts="p", reward="a:b", max_turns=3).check_complete()
