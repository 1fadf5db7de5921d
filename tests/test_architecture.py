"""The sources hold the rules of the tree: which part may depend on which, sizes of functions, right
maps of folders.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "benchmarks": ROOT / "benchmarks",
    "fastp3o": ROOT / "fastp3o",
    "fastp3o_kernels": ROOT / "kernels" / "fastp3o_kernels",
    "scripts": ROOT / "scripts",
}


class Imports:
    """The imports of the modules of some packages, in functions too. modules: dotted names; a
    package stands for its __init__.py. named: of each module, the modules of ours that it names,
    and other packages by their first name.
    """

    def __init__(self, packages: dict[str, Path]):
        files = {
            dotted(name, folder, path): path
            for name, folder in packages.items()
            for path in folder.rglob("*.py")
        }
        self.modules = set(files)
        self.named = {
            module: set(
                self.names_in(ast.parse(path.read_text()), module, path.name == "__init__.py")
            )
            for module, path in files.items()
        }

    def names_in(self, tree: ast.Module, module: str, is_package: bool) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (self.known(alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                parents = module.split(".")
                base = parents[: len(parents) - node.level + is_package] if node.level else []
                source = ".".join([*base, *([node.module] if node.module else [])])
                yield from (self.known(f"{source}.{alias.name}") for alias in node.names)

    def known(self, name: str) -> str:
        """The module of ours that a dotted name begins with, or the first name of another package."""
        parts = name.split(".")
        candidates = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((candidate for candidate in candidates if candidate in self.modules), parts[0])

    def reached_from(self, module: str) -> set[str]:
        """What importing a module runs: what it names, the __init__.py of each package above, and
        all that these do.
        """
        seen: set[str] = set()
        waiting = [module]
        while waiting:
            name = waiting.pop()
            found = (
                self.named[name] | {package for package in above(name) if package in self.modules}
            ) - seen
            seen |= found
            waiting += found & self.modules
        return seen


def dotted(package: str, folder: Path, path: Path) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join([package, *(part for part in parts if part != "__init__")])


def above(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def in_any(*packages: str) -> Callable[[str], bool]:
    return lambda name: any(within(name, package) for package in packages)


def concrete_objective(name: str) -> bool:
    shared = ("base", "config", "config.base", "kl_coefficient")
    return (
        name.startswith("fastp3o.objectives.")
        and name.removeprefix("fastp3o.objectives.") not in shared
    )


@pytest.fixture(scope="module")
def imports() -> Imports:
    return Imports(PACKAGES)


FORBIDDEN = [
    ("fastp3o_kernels", in_any("fastp3o", "benchmarks", "scripts", "tests")),
    ("fastp3o.packing", in_any("transformers", "fastp3o.config")),
    (
        "fastp3o.calls",
        in_any(
            "fastp3o.config",
            "fastp3o.data",
            "fastp3o.runtime",
            "fastp3o.rollouts",
            "fastp3o.rewards",
        ),
    ),
    (
        "fastp3o.runtime",
        in_any("fastp3o.config", "fastp3o.packing", "fastp3o.models", "fastp3o.optimizer"),
    ),
    ("fastp3o.objectives", in_any("fastp3o.rollouts", "accelerate")),
    ("fastp3o.run", concrete_objective),
    ("fastp3o.training.microbatches", concrete_objective),
    ("benchmarks", in_any("tests")),
    ("fastp3o", in_any("benchmarks", "scripts", "tests")),
]


def folders_in_order() -> list[str]:
    """The trainer's folders from top to bottom, as the page names them."""
    page = " ".join((PACKAGES["fastp3o"] / "README.md").read_text().split())
    (order,) = re.findall(r"Imports point down this order: ([a-z, ]+);", page)
    return order.split(", ")


def test_the_page_orders_all_folders_and_its_table_has_the_lowest_first():
    folders = {path.parent.name for path in PACKAGES["fastp3o"].glob("*/__init__.py")}
    rows = re.findall(
        r"^\| `(\w+)/` \|", (PACKAGES["fastp3o"] / "README.md").read_text(), flags=re.MULTILINE
    )
    assert set(rows) == folders
    assert [row for row in rows if row != "integrations"] == folders_in_order()[::-1]


# A folder with those above it, which none of its imports may reach.
ABOVE = [
    (f"fastp3o.{folder}", in_any(*(f"fastp3o.{other}" for other in folders_in_order()[:place])))
    for place, folder in enumerate(folders_in_order())
    if place
]


@pytest.mark.parametrize(("package", "forbidden"), [*FORBIDDEN, *ABOVE])
def test_must_not_depend(imports: Imports, package: str, forbidden: Callable[[str], bool]):
    own = [module for module in imports.modules if within(module, package)]
    assert own
    wrong = {
        module: names
        for module in own
        if (names := set(filter(forbidden, imports.reached_from(module))))
    }
    assert not wrong


def test_integrations_are_a_house_of_their_own(imports: Imports):
    """They need only the losses, and only files for others' trainers need them and name these
    trainers.
    """
    trainers = in_any("trl", "verl", "openrlhf")
    for module, named in imports.named.items():
        if within(module, "fastp3o.integrations"):
            assert all(
                map(in_any("fastp3o.integrations", "fastp3o_kernels"), named & imports.modules)
            ), module
        elif not within(module, "benchmarks"):
            assert not any(
                within(name, "fastp3o.integrations") or trainers(name) for name in named
            ), module


def test_no_module_is_part_of_an_import_cycle(imports: Imports):
    """That a package's __init__.py comes first is no circle."""
    TopologicalSorter(
        {m: named & imports.modules - {m} for m, named in imports.named.items()}
    ).prepare()


def test_the_kernels_name_torch_and_triton_alone(imports: Imports):
    named = {
        name
        for module in imports.modules
        if within(module, "fastp3o_kernels")
        for name in imports.named[module]
    }
    assert named - imports.modules - sys.stdlib_module_names <= {"torch", "triton"}


def test_importing_the_kernels_loads_torch_and_triton_alone():
    program = (
        "import sys, torch\n"
        "try: import triton\n"
        "except ImportError: pass\n"
        "before = {name.split('.')[0] for name in sys.modules}\n"
        "import fastp3o_kernels\n"
        "print(*({name.split('.')[0] for name in sys.modules} - before - sys.stdlib_module_names))\n"
        "assert 'torch._dynamo' not in sys.modules, 'the compiler takes longer to import than all else'"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.check_output(command, cwd=ROOT / "kernels", text=True).split() == [
        "fastp3o_kernels"
    ]


LONGEST_FUNCTION = 60  # lines
# The online loop and what it is made of are read from top to bottom, with a comment to each block.
READ_WHOLE = {("training/loop.py", "train"), ("training/online.py", "set_up")}
MOST_PARAMETERS = 8  # without self and cls
# Called by transformers, which gives it this signature.
GIVEN_SIGNATURES = {("models/attention.py", "segment_attention")}


def test_functions_of_the_trainer_are_short_and_take_few_parameters():
    folder = PACKAGES["fastp3o"]
    for path in folder.rglob("*.py"):
        name = str(path.relative_to(folder))
        for node in ast.walk(ast.parse(path.read_text())):
            # Integrations have other trainers' interfaces.
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not name.startswith(
                "integrations/"
            ):
                own = node.args
                parameters = {
                    each.arg for each in (*own.posonlyargs, *own.args, *own.kwonlyargs)
                } - {"self", "cls"}
                given = (name, node.name) in GIVEN_SIGNATURES
                assert given or len(parameters) <= MOST_PARAMETERS, f"{name}: {node.name}"
                is_short = node.end_lineno - node.lineno < LONGEST_FUNCTION
                assert is_short or (name, node.name) in READ_WHOLE, f"{name}: {node.name}"


def test_options_are_read_as_what_they_are_and_set_in_one_place():
    """Nobody asks whether a configuration has an option: a part takes one that has it, or
    `Flags.values`. No class writes over what was set: `Flags.derived` says what a value stands for.
    """
    folder, options = PACKAGES["fastp3o"], every_option()
    assert {"environment", "resume", "process_rewards"} <= options
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "getattr"
                and len(node.args) == 3
            ):
                asked = ast.unparse(node.args[0]) in ("config", "self.config", "self")
                name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
                assert not (asked and name in options), f"{path}: {ast.unparse(node)}"
            where = f"{path.relative_to(folder)}, line {getattr(node, 'lineno', 0)}"
            assert not (isinstance(node, ast.Attribute) and node.attr == "__setattr__"), where


def test_no_text_carries_an_object():
    """What stands in the place of a text has a type of its own, such as those of `fastp3o.sources`."""
    for path in PACKAGES["fastp3o"].rglob("*.py"):
        classes = (
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
        )
        assert not [one.name for one in classes if "str" in map(ast.unparse, one.bases)], path


def every_option() -> set[str]:
    """The names of all options of all stages, and of what configurations say beside them."""
    names: set[str] = set()
    for path in PACKAGES["fastp3o"].rglob("*.py"):
        if path.name == "config.py" or path.parent.name == "config":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    names |= {
                        one.target.id
                        for one in node.body
                        if isinstance(one, ast.AnnAssign) and one.value is not None
                    }
                    names |= {
                        one.name
                        for one in node.body
                        if isinstance(one, ast.FunctionDef) and one.decorator_list
                    }
    return names


# A line of a map: a file or folder, or several with commas between, then what they hold.
MAP_LINE = re.compile(r"((?:[\w-]+(?:\.py|/), )*[\w-]+(?:\.py|/))\s{2,}\S")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_map_of_a_folder_names_all_of_its_files_and_no_others(package: str):
    for path in sorted(PACKAGES[package].rglob("__init__.py")):
        docstring, folder = ast.get_docstring(ast.parse(path.read_text())) or "", path.parent
        lines = filter(None, map(MAP_LINE.match, docstring.splitlines()))
        if named := {name for line in lines for name in line[1].split(", ")}:
            files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
            assert named == files | {
                f"{path.parent.name}/" for path in folder.glob("*/__init__.py")
            }, folder


def test_the_top_level_has_the_projects_folders_alone():
    """What a run or a test has left there is easily committed with the rest."""
    if not (ROOT / ".git").exists():
        pytest.skip("the tree is no clone")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("git does not answer")
    names = {path.partition("/")[0] for path in listed.stdout.split("\0") if path}
    expected = {
        "benchmarks",
        "fastp3o",
        "kernels",
        "scripts",
        "tests",
        "pyproject.toml",
        "README.md",
    }
    assert {name for name in names if not name.startswith(".")} - {
        "LICENSE",
        "CITATION.cff",
    } == expected
