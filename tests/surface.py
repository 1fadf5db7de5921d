"""What a user meets and a contributor reads, counted: `python -m tests.surface --write` writes
surface.md.

Counted are the flags of each command, public names, objectives, commands, and the tokens of code in
each folder: what Python reads, without comments, docstrings and help texts. Lines are not: saving
them costs what somebody needs to read.
"""

import argparse
import ast
import io
import token
import tokenize
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import fastp3o
import fastp3o_kernels
from fastp3o.__main__ import COMMANDS, STAGES, imported
from fastp3o.config import Flags, RunConfig, TrainingRunConfig
from fastp3o.objectives.config.online import OBJECTIVES
from fastp3o.objectives.config.preferences import OFFLINE_OBJECTIVES

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".md")
PACKAGES = ("kernels/fastp3o_kernels", "fastp3o", "benchmarks", "scripts")
LAYOUT = {token.NEWLINE, token.NL, token.INDENT, token.DEDENT, token.COMMENT, token.ENDMARKER}
# Python 3.12 reads an f-string as many tokens, 3.11 as one.
FSTRING_BEGINS, FSTRING_ENDS = (
    getattr(token, "FSTRING_START", None),
    getattr(token, "FSTRING_END", None),
)

Position = tuple[int, int]  # line and column, the column in bytes


def concepts() -> dict[str, int]:
    """What a user can name, by what it is."""
    flags: dict[str, set[str]] = {}
    for command, (place, _) in STAGES.items():
        chosen = imported(place)
        classes: list[type[Flags]] = list(chosen.values()) if isinstance(chosen, dict) else [chosen]
        flags[command] = {
            field.name for config in classes for field in fields(config) if field.init
        }
    counts = {f"flags of `{command}`": len(names) for command, names in flags.items()}
    return counts | {
        "flags, each counted once": len(set().union(*flags.values())),
        "commands": len(COMMANDS),
        "online objectives": len(OBJECTIVES),
        "objectives of fixed preferences": len(OFFLINE_OBJECTIVES),
        "public names of `fastp3o`": len(fastp3o.__all__),
        "public names of `fastp3o_kernels`": len(fastp3o_kernels.__all__),
        "classes from `Flags` down to the deepest configuration": max(map(depth, configurations())),
        "modules that take a whole configuration": len(modules_with_whole_configurations()),
    }


def configurations() -> list[type[Flags]]:
    """What commands are configured by."""
    chosen = [imported(place) for place, _ in STAGES.values()]
    return [
        one
        for choice in chosen
        for one in (choice.values() if isinstance(choice, dict) else [choice])
    ]


def depth(config: type[Flags]) -> int:
    """Classes on the longest way from `Flags` to a configuration, both counted."""
    return 1 + max((depth(base) for base in config.__bases__ if issubclass(base, Flags)), default=0)


def modules_with_whole_configurations() -> list[Path]:
    """The trainer's modules that name a command's configuration, or what several of these have in
    common, and not only a group of their options. Modules of options are not counted.
    """
    bases = {
        base for one in configurations() for base in one.__mro__ if issubclass(base, RunConfig)
    }
    whole = {base.__name__ for base in bases - {RunConfig, TrainingRunConfig}}
    modules = (
        path
        for path in (ROOT / "fastp3o").rglob("*.py")
        if not {"config", "integrations"} & {*path.with_suffix("").parts}
    )
    return [path for path in modules if whole & named_in(path)]


def named_in(path: Path) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}


def tokens_by_folder() -> dict[str, int]:
    """Tokens of code in the files of each folder, without those of its folders."""
    counts: dict[str, int] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            folder = path.parent.relative_to(ROOT).as_posix()
            counts[folder] = counts.get(folder, 0) + tokens_of_code(
                path.read_text(encoding="utf-8")
            )
    return counts


def tokens_of_code(source: str) -> int:
    words = set(explanations(ast.parse(source)))
    count = nested = 0
    for one in tokenize.generate_tokens(io.StringIO(source).readline):
        line, column = one.start
        nested -= one.type == FSTRING_ENDS
        begins_word = one.type == token.STRING or one.type == FSTRING_BEGINS
        explains = begins_word and any(
            first <= (line, len(one.line[:column].encode())) < last for first, last in words
        )
        count += not (nested or explains or one.type in LAYOUT or one.type == FSTRING_ENDS)
        nested += one.type == FSTRING_BEGINS
    return count


def explanations(tree: ast.Module) -> Iterator[tuple[Position, Position]]:
    """Where docstrings and help texts begin and end: arguments `help`, and the words of `option`
    and `required`.
    """
    for node in ast.walk(tree):
        words: list[ast.expr] = []
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            words = [node.value]
        elif isinstance(node, ast.Call):
            words = [
                keyword.value for keyword in node.keywords if keyword.arg in ("help", "description")
            ]
            if isinstance(node.func, ast.Name) and node.func.id in ("option", "required"):
                words += node.args[node.func.id == "option" :]
        for word in words:
            assert word.end_lineno is not None
            assert word.end_col_offset is not None
            yield (word.lineno, word.col_offset), (word.end_lineno, word.end_col_offset)


def tables() -> str:
    """The page: one table of concepts, one of tokens."""
    tokens = tokens_by_folder()
    parts = [
        "# What there is to know, and to read\n",
        "Written by `python -m tests.surface --write`.\n",
        table("what a user can name", concepts()),
        table("tokens of code", tokens | {"**in all**": sum(tokens.values())}),
    ]
    return "\n".join(parts)


def table(heading: str, counts: dict[str, int]) -> str:
    rows = [f"| {name} | {count:,} |" for name, count in counts.items()]
    return "\n".join([f"| {heading} | |", "| --- | ---: |", *rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"Write {RECORD.name}, too.")
    page = tables()
    if parser.parse_args().write:
        RECORD.write_text(page, encoding="utf-8")
    print(page, end="")


if __name__ == "__main__":
    main()
