"""The command line: flags and YAML files that set the options of a configuration, with errors in
one line.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from inspect import get_annotations
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

import yaml

from fastp3o.calls.function import colon_form
from fastp3o.config import Flags, ObjectiveConfig, bounds, field_type, text_of
from fastp3o.script import DEBUG_HELP
from fastp3o.trl_names import with_hints

Config = TypeVar("Config", bound=Flags)

# Sections of the help, in order; what is in none of them comes first.
SECTIONS = [
    "objective",
    "updates",
    "data",
    "model",
    "adapters",
    "sampling",
    "turns",
    "rewards",
    "optimizer",
    "evaluation",
    "run",
]
# What the short help shows of the sections, beside the options that are required or the command's
# alone.
COMMON = {
    "data": "train_data eval_data eval_prompts max_prompt_tokens max_response_tokens",
    "steps": "updates prompts_per_update responses_per_prompt epochs batch_size learning_rate kl_coef",
    "sampling": "temperature sampler",
    "model": "reference lora_rank quantize precision tokens_per_row gradient_checkpointing",
    "run": "eval_every keep_best resume seed report_to",
}


# --- help -----------------------------------------------------------------------------------------


def make_parser(config_class: type[Flags], *, shows_all: bool = False) -> argparse.ArgumentParser:
    """A parser of a configuration's fields, whose help says defaults and bounds. A field `a_b` is
    the flag --a_b, or --a-b. A bool may stand alone (--resume) or take a value (--resume no); one
    that is True by default has --no_a_b.

    Values are only of flags that were set; what is missing is for `parse` to say. Help begins with
    what every run must say, then comes a section for each group of options. shows_all: all of them,
    not only COMMON.
    """
    needed = "".join(
        f"--{flag.name} {flag.name.upper()} " for flag in fields(config_class) if is_required(flag)
    )
    hidden = (
        0 if shows_all else sum(not is_common(config_class, flag) for flag in fields(config_class))
    )
    parser = argparse.ArgumentParser(
        usage=f"%(prog)s {needed}[--config FILE.yaml] [--option value ...]",
        description=config_class.summary,
        epilog=DEBUG_HELP + (f" {hidden} further options: --help all." if hidden else ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,  # --update would set --updates until another flag begins like that
        add_help=False,
    )
    types = get_type_hints(config_class)
    used = dict.fromkeys(section(config_class, flag) for flag in fields(config_class))
    titles = [
        "required",
        *sorted(used, key=lambda title: SECTIONS.index(title) if title in SECTIONS else -1),
    ]
    groups = {title: parser.add_argument_group(title) for title in titles}
    for flag in fields(config_class):
        kind = field_type(types[flag.name])
        visible = shows_all or is_common(config_class, flag)
        options: dict[str, Any] = {
            "help": explained(flag) if visible else argparse.SUPPRESS,
            "type": kind,
        }
        if "choices" in flag.metadata:
            options["choices"] = flag.metadata["choices"]
        if kind is bool:
            options |= {"type": truth, "nargs": "?", "const": True}
        group = groups["required" if is_required(flag) else section(config_class, flag)]
        group.add_argument(f"--{flag.name}", **options)
        if flag.default is True:
            off: dict[str, Any] = {"dest": flag.name, "action": "store_false"}
            help_text = negated(flag.metadata["help"]) if visible else argparse.SUPPRESS
            group.add_argument(f"--no_{flag.name}", help=help_text, **off)
    return parser


def is_required(flag: Field) -> bool:
    return flag.default is MISSING or bool(flag.metadata.get("required"))


def is_common(config_class: type[Flags], flag: Field) -> bool:
    """Whether the short help shows an option: what most runs set, what the command alone has, and
    the objective's.
    """
    common = " ".join(COMMON.values()).split()
    is_commands = flag.name in get_annotations(config_class)
    is_objectives = section(config_class, flag) == "objective"
    return is_required(flag) or flag.name in common or is_commands or is_objectives


def section(config_class: type[Flags], flag: Field) -> str:
    """The heading of an option in the help: that of the group of options that has it first."""
    first = next(
        group for group in reversed(config_class.__mro__) if flag.name in get_annotations(group)
    )
    return str(vars(first).get("section", Flags.section))


def explained(flag: Field) -> str:
    """The help of an option with its bounds, and with its default where this is not empty: then the
    words say it.
    """
    default = "" if is_required(flag) or flag.default in (None, "") else f"default: {flag.default}"
    facts = "; ".join(filter(None, [bounds(flag.metadata), default]))
    return (flag.metadata["help"] + (f" ({facts})" if facts else "")).replace("%", "%%")


def negated(help_text: str) -> str:
    """The first sentence of an option that is on by default, an imperative, for the flag that turns
    it off.
    """
    sentence = help_text.split(". ")[0].rstrip(".")
    return f"Do not {sentence[0].lower()}{sentence[1:]}."


def with_underscores(argument: str) -> str:
    """`--learning-rate=1` as `--learning_rate=1`."""
    name, equals, value = argument.partition("=")
    return (
        name.replace("-", "_").replace("__", "--", 1) + equals + value
        if name.startswith("--")
        else argument
    )


def truth(text: str) -> bool:
    """Raises argparse's error for text that is neither yes nor no."""
    if text.lower() in ("yes", "true", "t", "y", "1"):
        return True
    if text.lower() in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(
        f"expected yes or no, true or false, t or f, y or n, 1 or 0, got {text!r}"
    )


# --- unknown options ------------------------------------------------------------------------------


def refused(arguments: Sequence[str], config_class: type[Flags]) -> str:
    """What is wrong with arguments that no option takes, with what is meant in place of each."""
    unknown = [argument.split("=")[0] for argument in arguments if argument.startswith("--")]
    if not unknown:
        return f"unexpected argument {arguments[0]!r}"
    names = [flag.name for flag in fields(config_class)]
    said = with_hints(unknown, names, config_class.instead)
    return f"unknown option{'s' * (len(unknown) > 1)} {said}"


# --- options from arguments -----------------------------------------------------------------------


def parse(config_class: type[Config], arguments: list[str] | None = None) -> Config:
    """Reads a stage's configuration from flags, or from one YAML file whose values further flags
    override. Exits with a usage message on an unknown flag or key, a key that comes twice, or a bad
    value, with the flag's name: all unknown ones at once, and then all that are missing.
    """
    path, arguments = split_off_yaml(arguments)
    if asked := {"-h", "--help"} & set(arguments):
        parser = make_parser(
            config_class, shows_all="all" in arguments[arguments.index(min(asked)) + 1 :][:1]
        )
        parser.print_help()
        parser.exit()
    parser = make_parser(config_class)
    from_file = {} if path is None else yaml_values(parser, path)
    names = [flag.name for flag in fields(config_class)]
    if others := [name for name in from_file if name not in names]:
        parser.error(
            f"unknown option{'s' * (len(others) > 1)} in {path}: {with_hints(others, names, config_class.instead)}"
        )
    in_file = [
        f"--{flag.name}={text_value(parser, path, flag, from_file[flag.name])}"
        for flag in fields(config_class)
        if flag.name in from_file
    ]
    values, left = parser.parse_known_args([*in_file, *map(with_underscores, arguments)])
    if left:
        parser.error(refused(left, config_class))
    if missing := [
        flag.name for flag in fields(config_class) if is_required(flag) and flag.name not in values
    ]:
        parser.error(f"required and missing: {', '.join(f'--{name}' for name in missing)}")
    try:
        config = config_class(**vars(values))
        config.check_complete()
    except ValueError as error:
        parser.error(str(error))
    return config


def parse_chosen(
    classes: Mapping[str, type[Config]],
    arguments: list[str] | None = None,
    *,
    of_function: type[Config] | None = None,
) -> Config:
    """Reads, as `parse` does, the configuration that `--objective` names, or `objective` in the
    YAML file. classes: keys are the objectives; each class has its own (`ObjectiveConfig`).
    of_function: that of a function of the user's, `module:function`, where one can stand for an
    objective. `--help` explains the options of the objective, or lists the objectives if none is
    named.
    """
    named = {**classes, "module:function": of_function} if of_function is not None else classes
    summaries = [
        f"  {name:<14} {str(chosen.summary).splitlines()[0]}" for name, chosen in named.items()
    ]
    parser = argparse.ArgumentParser(
        description="\n".join(
            ["objectives, whose options --objective NAME --help explains:", *summaries]
        ),
        epilog=DEBUG_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--config FILE.yaml] --objective NAME [--option value ...]",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--objective", metavar="NAME", help="Training objective.")
    path, flags = split_off_yaml(arguments)
    values = {} if path is None else yaml_values(parser, path)
    in_file = []
    if "objective" in values:
        objective = next(flag for flag in fields(ObjectiveConfig) if flag.name == "objective")
        in_file = [f"--objective={text_value(parser, path, objective, values['objective'])}"]
    flags_of_choice, others = parser.parse_known_args(in_file + flags)
    name = flags_of_choice.objective
    if name is not None:
        chosen = of_function if ":" in name and of_function is not None else classes.get(name)
        if chosen is None:
            function = colon_form(name) if of_function is not None else None
            meant = f"; a function is {function}" if function else ""
            parser.error(
                f"argument --objective: invalid choice: {name!r} (choose from "
                f"{', '.join(named)}){meant}"
            )
        return parse(chosen, arguments)
    if {"-h", "--help"} & set(others):
        parser.print_help()
        parser.exit()
    parser.error(f"--objective is missing: one of {', '.join(classes)}")


# --- options from a YAML file ---------------------------------------------------------------------


def split_off_yaml(arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    """The YAML file, which comes first or behind --config, and the flags. arguments: None for those
    of the process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and not arguments[0].startswith("--") and arguments[0].endswith((".yaml", ".yml")):
        return Path(arguments[0]), arguments[1:]
    for place, argument in enumerate(arguments):
        name, equals, file = argument.partition("=")
        if name == "--config" and equals:
            return Path(file), arguments[:place] + arguments[place + 1 :]
        if name == "--config" and arguments[place + 1 :]:
            return Path(arguments[place + 1]), arguments[:place] + arguments[place + 2 :]
    return None, arguments


def yaml_values(parser: argparse.ArgumentParser, path: Path) -> dict[str, Any]:
    """Each field's value: the text as it is written, or a list or a dict. Exits with a usage
    message if a field has no value, or more than one.
    """

    def refuse(problem: str) -> NoReturn:
        parser.error(f"{path} {problem}")

    try:
        document = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        parser.error(f"cannot read {path}: {' '.join(str(error).split())}")
    if not isinstance(document, yaml.MappingNode):
        refuse("must hold one `field: value` a line")
    entries = [(str(key.value), value) for key, value in document.value]
    if twice := [name for name, count in Counter(name for name, _ in entries).items() if count > 1]:
        refuse(f"gives more than one value for {', '.join(twice)}")
    if empty := [name for name, value in entries if value.tag == "tag:yaml.org,2002:null"]:
        refuse(f"gives no value for {', '.join(empty)}")
    return {
        name: node.value if isinstance(node, yaml.ScalarNode) else content[name]
        for name, node in entries
    }


def text_value(parser: argparse.ArgumentParser, path: Path | None, flag: Field, value: Any) -> str:
    """A YAML file's value as the text of a flag. Lists and mappings are for options that take them
    in Python, too.
    """
    if isinstance(value, str):
        return value
    if (text := text_of(flag, value)) is None:
        parser.error(f"{path} must give a single value for {flag.name}, not a list or a mapping")
    return text
