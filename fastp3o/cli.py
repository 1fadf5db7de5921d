"""The command line: flags and YAML files that set the options of a configuration, with errors in one line."""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

try:
    import yaml
except ModuleNotFoundError as error:  # the first package that only the trainer needs
    raise ModuleNotFoundError("fastp3o's trainer needs further packages: pip install '.[trainer]'") from error

from fastp3o.config import Flags, bounds, field_type
from fastp3o.script import DEBUG_HELP
from fastp3o.trl_names import hint

Config = TypeVar("Config", bound=Flags)


def make_parser(config_class: type[Flags]) -> argparse.ArgumentParser:
    """A parser of a configuration's fields, whose help says defaults and bounds. A field `a_b` is the flag --a_b, or
    --a-b. A bool may stand alone (--resume) or take a value (--resume no); one that is True by default has --no_a_b.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [CONFIG.yaml] [--field value ...]",
        description=config_class.summary,
        epilog=DEBUG_HELP,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,  # --update would set --updates until another flag begins like that
    )
    types = get_type_hints(config_class)
    for flag in fields(config_class):
        kind, limits = field_type(types[flag.name]), bounds(flag.metadata)
        says_default = flag.default not in (None, "")  # else the help does, in words
        shown = "; ".join(filter(None, [limits, "default: %(default)s" if says_default else ""]))
        help_text = flag.metadata["help"] + (f" ({shown})" if limits else "")
        default = flag.default if says_default else argparse.SUPPRESS
        options: dict[str, Any] = {"help": help_text, "type": kind, "default": default}
        if "choices" in flag.metadata:
            options["choices"] = flag.metadata["choices"]
        if kind is bool:
            options |= {"type": truth, "nargs": "?", "const": True}
        if flag.default is MISSING or flag.metadata.get("required"):
            options |= {"required": True, "default": argparse.SUPPRESS}
        parser.add_argument(f"--{flag.name}", **options)
        if flag.default is True:
            off: dict[str, Any] = {"dest": flag.name, "action": "store_false", "default": argparse.SUPPRESS}
            parser.add_argument(f"--no_{flag.name}", help=negated(flag.metadata["help"]), **off)
    return parser


def negated(help_text: str) -> str:
    """The first sentence of an option that is on by default, an imperative, for the flag that turns it off."""
    sentence = help_text.split(". ")[0].rstrip(".")
    return f"Do not {sentence[0].lower()}{sentence[1:]}."


def with_underscores(argument: str) -> str:
    """`--learning-rate=1` as `--learning_rate=1`."""
    name, equals, value = argument.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if name.startswith("--") else argument


def truth(text: str) -> bool:
    """Raises argparse's error for text that is neither yes nor no."""
    if text.lower() in ("yes", "true", "t", "y", "1"):
        return True
    if text.lower() in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"expected yes or no, true or false, t or f, y or n, 1 or 0, got {text!r}")


def unknown(arguments: Sequence[str], flags: Sequence[str]) -> str:
    """The message for arguments that no flag takes, with the flag that is nearest to the first of them."""
    name = next((argument.split("=")[0] for argument in arguments if argument.startswith("--")), None)
    if name is None:
        return f"unexpected argument {arguments[0]!r}"
    return f"unknown option {name}" + hint(name.removeprefix("--"), [flag.removeprefix("--") for flag in flags])


def parse(config_class: type[Config], arguments: list[str] | None = None) -> Config:
    """Reads a stage's configuration from flags, or from one YAML file whose values further flags override. Exits with a
    usage message on an unknown flag or key, a key that comes twice, or a bad value, with the flag's name.
    """
    parser = make_parser(config_class)
    path, arguments = split_off_yaml(arguments)
    from_file = {} if path is None else yaml_values(parser, path)
    if others := from_file.keys() - {f.name for f in fields(config_class)}:
        parser.error(f"unknown option in {path}: {', '.join(sorted(others))}")
    flags = [*(f"--{name}={value}" for name, value in from_file.items()), *map(with_underscores, arguments)]
    values, left = parser.parse_known_args(flags)
    if left:
        parser.error(unknown(left, [name for action in parser._actions for name in action.option_strings]))
    try:
        config = config_class(**vars(values))
        config.check_complete()
    except ValueError as error:
        parser.error(str(error))
    return config


def parse_chosen(classes: Mapping[str, type[Config]], arguments: list[str] | None = None) -> Config:
    """Reads, as `parse` does, the configuration that `--objective` names, or `objective` in the YAML file. classes:
    keys are the objectives; each class has its own (`ObjectiveConfig`). `--help` explains the
    options of the objective, or lists the objectives if none is named.
    """
    summaries = [f"  {name:<15}{str(chosen.summary).splitlines()[0]}" for name, chosen in classes.items()]
    parser = argparse.ArgumentParser(
        description="\n".join(["objectives, whose options --objective NAME --help explains:", *summaries]),
        epilog=DEBUG_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [CONFIG.yaml] --objective NAME [--field value ...]",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--objective", choices=list(classes), metavar="NAME", help="Training objective.")
    path, flags = split_off_yaml(arguments)
    values = {} if path is None else yaml_values(parser, path)
    named = [f"--objective={values['objective']}"] if "objective" in values else []
    flags_of_choice, others = parser.parse_known_args(named + flags)
    if flags_of_choice.objective is not None:
        return parse(classes[flags_of_choice.objective], arguments)
    if {"-h", "--help"} & set(others):
        parser.print_help()
        parser.exit()
    parser.error(f"--objective is missing: one of {', '.join(classes)}")


def split_off_yaml(arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    """The YAML file, which may come first, and the flags. arguments: None for those of the process."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    has_file = bool(arguments) and arguments[0].endswith((".yaml", ".yml"))
    return (Path(arguments[0]), arguments[1:]) if has_file else (None, arguments)


def yaml_values(parser: argparse.ArgumentParser, path: Path) -> dict[str, str]:
    """The text of each field's value. Exits with a usage message if a field has none, or more than one."""

    def refuse(problem: str) -> NoReturn:
        parser.error(f"{path} {problem}")

    try:
        document = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        parser.error(f"cannot read {path}: {' '.join(str(error).split())}")
    if not isinstance(document, yaml.MappingNode):
        refuse("must hold one `field: value` a line")
    entries = [(str(key.value), value) for key, value in document.value]
    if twice := [name for name, count in Counter(name for name, _ in entries).items() if count > 1]:
        refuse(f"gives more than one value for {', '.join(twice)}")
    if nested := [name for name, value in entries if not isinstance(value, yaml.ScalarNode)]:
        refuse(f"must give a single value for {', '.join(nested)}, not a list or a mapping")
    if empty := [name for name, value in entries if value.tag == "tag:yaml.org,2002:null"]:
        refuse(f"gives no value for {', '.join(empty)}")
    return {name: value.value for name, value in entries}
