"""What is public, as pages: signatures and docstrings of names, and the options of commands.
Nothing of it is typed.
"""

import ast
import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import get_type_hints

from fastp3o.__main__ import STAGES, imported
from fastp3o.cli import SECTIONS, is_required, section
from fastp3o.config import Flags, bounds, field_type

ROOT = Path(__file__).parents[2]
HEADING = "## What is public\n"
# Stages whose page has all options, and choices of an objective, whose page has what differs from
# the stage's.
WHOLE = {
    "p3o": "p3o",
    "dpo": "preference",
    "sft": "sft",
    "reward": "reward",
    "generate": "generate",
}
DIFFERENCES = {"online": "p3o", "preference": "dpo"}


def reference() -> dict[str, str]:
    """All pages of the reference, by their path on the site."""
    pages = {f"reference/options/{name}.md": all_options(name) for name in WHOLE}
    pages |= {f"reference/options/{command}.md": differences(command) for command in DIFFERENCES}
    pages |= {f"reference/{module}.md": names_page(module) for module in public_modules()}
    return pages | {"reference/README.md": first_page()}


def first_page() -> str:
    """The table of what is public, whose modules lead to their pages."""
    text = (ROOT / "fastp3o/README.md").read_text().partition(HEADING)[2].partition("\n## ")[0]
    text = re.sub(r"`(fastp3o\w*(?:\.\w+)*)`", r"[`\1`](\1.md)", text)
    text = re.sub(r"\]\((\w+/\w+\.md)", r"](../fastp3o/\1", text)
    options = [f"- [{title(name)}](options/{name}.md)" for name in (*WHOLE, *DIFFERENCES)]
    return "\n".join(["# Reference", text, "## Options", "", *options, ""])


# --- Python ---------------------------------------------------------------------------------------


def public_modules() -> list[str]:
    """The modules that the page of the trainer calls public."""
    text = (ROOT / "fastp3o/README.md").read_text().partition(HEADING)[2].partition("\n## ")[0]
    return re.findall(r"`(fastp3o\w*(?:\.\w+)*)`", text)


def source_of(module: str) -> Path:
    """The file of a module, which is not imported: some need torch or another trainer."""
    root = ROOT / "kernels" if module.startswith("fastp3o_kernels") else ROOT
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public_names(module: str) -> dict[str, str]:
    """The names of a module's `__all__`, each with the module that defines it."""
    source = source_of(module)
    stub = source.with_suffix(".pyi")
    tree = ast.parse((stub if stub.exists() else source).read_text())
    homes = {
        alias.asname or alias.name: str(node.module)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    if stub.exists():
        return dict(sorted(homes.items()))
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return {name: homes.get(name, module) for name in names}


def names_page(module: str) -> str:
    """Signatures and docstrings of a module's public names; configurations have pages of their own."""
    lines = [
        f"# `{module}`",
        "",
        ast.get_docstring(ast.parse(source_of(module).read_text())) or "",
        "",
    ]
    configurations = []
    for name, home in public_names(module).items():
        if name.endswith("Config") and module == "fastp3o":
            configurations.append(name)
        elif f"{home}.{name}" not in public_modules():
            lines += [f"::: {home}.{name}", ""]
    if configurations:
        lines += ["## Configurations", ""]
        lines += [f"- [`{name}`](options/{page_of(name)})" for name in configurations]
    return "\n".join([*lines, ""])


# --- options --------------------------------------------------------------------------------------


def choices(command: str) -> dict[str, type[Flags]]:
    """The configurations of a command, by objective, or by its name; `function` is one in an
    objective's place.
    """
    chosen = imported(STAGES[command][0])
    if command == "online":
        chosen = chosen | {"function": imported("objectives.config.function:FunctionConfig")}
    return chosen if isinstance(chosen, dict) else {command: chosen}


def page_of(configuration: str) -> str:
    """The page of options, with the heading, of a configuration's name."""
    for name, command in WHOLE.items():
        if choices(command)[name].__name__ == configuration:
            return f"{name}.md"
    for command in DIFFERENCES:
        for name, one in choices(command).items():
            if one.__name__ == configuration:
                return f"{command}.md#{name}"
    raise ValueError(f"no command has the options of {configuration}")


def title(page: str) -> str:
    """The heading of a page of options."""
    if page in WHOLE:
        return f"`fastp3o {page}`: {choices(WHOLE[page])[page].__name__}"
    return f"`fastp3o {page} --objective NAME`"


def all_options(page: str) -> str:
    """Every option of a configuration, in the sections of its help."""
    config = choices(WHOLE[page])[page]
    titles = dict.fromkeys(
        "required" if is_required(flag) else section(config, flag) for flag in fields(config)
    )
    lines = [
        f"# {title(page)}",
        "",
        config.summary,
        "",
        "Flags, keys of a YAML file and arguments in Python.",
        "",
    ]
    for name in sorted(titles, key=lambda one: SECTIONS.index(one) if one in SECTIONS else -1):
        chosen = [
            f
            for f in fields(config)
            if ("required" if is_required(f) else section(config, f)) == name
        ]
        lines += [f"## {name.capitalize()}", "", *options_table(config, chosen), ""]
    return "\n".join(lines)


def differences(command: str) -> str:
    """The other objectives of a command, each with the options that the one of the full page has
    not, or not so.
    """
    base_page = DIFFERENCES[command]
    base = choices(WHOLE[base_page])[base_page]
    of_base = {flag.name: described(base, flag) for flag in fields(base)}
    lines = [
        f"# {title(command)}",
        "",
        f"Each has the options of [`{base.__name__}`]({base_page}.md), except:",
        "",
    ]
    for name, config in choices(command).items():
        if config is base:
            continue
        flags = [flag for flag in fields(config) if flag.name != "objective"]
        changed = [flag for flag in flags if of_base.get(flag.name) != described(config, flag)]
        absent = [
            f"`{gone}`"
            for gone in of_base
            if gone not in {*(flag.name for flag in flags), "objective"}
        ]
        lines += [f"## {name}", "", f"`{config.__name__}`. {config.summary}", ""]
        lines += [*options_table(config, changed), ""] if changed else []
        lines += [f"Does not have {', '.join(absent)}.", ""] if absent else []
    return "\n".join(lines)


def options_table(config: type[Flags], flags: list[Field]) -> list[str]:
    """The options as a table."""
    rows = (described(config, flag) for flag in flags)
    return ["| option | default | |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]


def described(config: type[Flags], flag: Field) -> tuple[str, str, str]:
    """The cells of an option: name, default, and type, bounds and help."""
    literal = flag.metadata.get("choices")
    kind = (
        " or ".join(f"`{one}`" for one in literal)
        if literal
        else field_type(get_type_hints(config)[flag.name]).__name__
    )
    facts = ", ".join(filter(None, [kind, bounds(flag.metadata)]))
    default = (
        "" if is_required(flag) or flag.default in (MISSING, None, "") else f"`{flag.default}`"
    )
    help_text = re.sub(r"([\\*_<|\[\]])", r"\\\1", flag.metadata.get("help", ""))
    return f"`{flag.name}`", default, f"{facts}. {help_text}"
