"""What `--help` says of each option: a sentence of its own, each choice by name, and what is not
done without it.
"""

import re
from dataclasses import fields

import pytest

from fastp3o.cli import make_parser
from fastp3o.commands.memory import MemoryConfig
from fastp3o.config import Flags
from fastp3o.evaluation.config import EvaluateConfig, WinRateConfig
from tests.fastp3o.bad_inputs.working import CONFIGS

# Words that say what a sentence is about only together with another one.
PRONOUNS = "it its they their theirs them this that these those his her one ones what which who whose whatever what's"
PREPOSITIONS = (
    "of for with without by in on at to from as between within behind after before against over under through up into "
    "towards among beside around near per except like"
)
EVERY = {WinRateConfig, EvaluateConfig, MemoryConfig}.union(
    *(kind.values() if isinstance(kind, dict) else [kind] for kind in CONFIGS.values())
)


@pytest.mark.parametrize("config", sorted(EVERY, key=lambda config: config.__name__))
def test_helps_name_what_they_explain_and_every_choice(config: type[Flags]):
    for flag in fields(config):
        said = flag.metadata["help"]
        first = re.findall(r"[\w']+", said)[0].lower()
        assert first not in {*PRONOUNS.split(), *PREPOSITIONS.split()}, (flag.name, said)
        assert said.endswith((".", ")")), (flag.name, said)
        for choice in flag.metadata.get("choices", ()):
            assert re.search(rf"(?<![\w-]){choice}(?![\w-])", said), (flag.name, choice, said)


@pytest.mark.parametrize("config", sorted(EVERY, key=lambda config: config.__name__))
def test_a_flag_that_turns_something_off_says_what_is_not_done_and_no_default_is_empty(
    config: type[Flags],
):
    parser = make_parser(config, shows_all=True)
    by_flag = {name: action for action in parser._actions for name in action.option_strings}
    for flag in fields(config):
        if flag.default is True:
            said = by_flag[f"--no_{flag.name}"].help
            assert said is not None
            # An imperative: another verb is another line here, not "Do not prompts are computed
            # once".
            assert re.match(r"Do not (compute|divide|exclude|let) [^.]*\.$", said), said
    shown = " ".join(parser.format_help().split())
    assert "default: None" not in shown
    assert "default: )" not in shown
