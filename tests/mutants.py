"""Breaks the source in one place at a time, and tells which of the breaks no test finds.

    python -m tests.mutants --count 60 --seed 0 --out mutants.jsonl

Places are drawn by lot, folder by folder. A mutant runs the tests that reach its line, until one fails, in a copy of
the tree, those of the same folder first. A run of the suite makes the map of lines and tests first (`--coverage FILE`
takes one that is there). `--again FILE` breaks what an earlier run broke, wherever it stands now. Hours for all; needs
the package pytest-cov.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("fastp3o", "kernels/fastp3o_kernels")
LONGEST = 900.0  # seconds of a mutant's tests

OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "+"}
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
COMPARISONS |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
OPPOSITES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "argmin": "argmax", "argmax": "argmin"}
OPPOSITES |= {"sum": "mean", "mean": "sum", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
# A call with these names becomes what it is called on.
DROPPED = ("detach", "clamp", "abs", "contiguous", "sorted", "exp")


@dataclass(frozen=True)
class Mutant:
    """file: from the root. line: from 1. start, end: in characters of the file's text. kind: what is changed."""

    file: str
    line: int
    start: int
    end: int
    kind: str
    before: str
    after: str


def mutants_in(file: str, text: str) -> Iterator[Mutant]:
    """All mutants of a source file: operators, bounds, conditions, signs, masks, orders, detached values, seeds."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        """Columns of ast count bytes."""
        start = starts[line - 1]
        row = text[start : starts[line]]
        return start + len(row.encode()[:column].decode())

    def span(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)

    def mutant(node: ast.expr, kind: str, start: int, end: int, after: str) -> Mutant:
        return Mutant(file, node.lineno, start, end, kind, text[start:end], after)

    def between(node: ast.expr, left: ast.expr, right: ast.expr, kind: str, after: str) -> Mutant:
        """Replaces what stands between two operands, but for the parentheses around them."""
        start, end = span(left)[1], span(right)[0]
        gap = text[start:end]
        opened = gap[len(gap.rstrip("( \n")) :].lstrip()
        closed = gap[: len(gap) - len(gap.lstrip(") \n"))].rstrip()
        return mutant(node, kind, start, end, f"{closed} {after} {opened}")

    for node in executed(ast.parse(text)):
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            yield between(node, node.left, node.right, "operator", OPERATORS[type(node.op)])
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            kind = "condition" if isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot) else "bound"
            yield between(node, node.left, node.comparators[0], kind, COMPARISONS[type(node.ops[0])])
        elif isinstance(node, ast.BoolOp):
            other = "or" if isinstance(node.op, ast.And) else "and"
            yield between(node, node.values[0], node.values[1], "condition", other)
        elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.UAdd):
            kind = {ast.USub: "sign", ast.Invert: "mask", ast.Not: "condition"}[type(node.op)]
            yield mutant(node, kind, *span(node), f"({ast.unparse(node.operand)})")
        elif isinstance(node, ast.IfExp):
            yield mutant(node.test, "condition", *span(node.test), f"(not ({ast.unparse(node.test)}))")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield mutant(node, "condition", *span(node), str(not node.value))
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            start, end = span(node.func)
            if name in OPPOSITES:
                yield mutant(node, "order", end - len(name), end, OPPOSITES[name])
            if name in DROPPED and isinstance(node.func, ast.Attribute):
                yield mutant(node, "detach" if name == "detach" else "order", *span(node), ast.unparse(node.func.value))
            elif name in DROPPED and len(node.args) == 1:
                yield mutant(node, "order", *span(node), f"list({ast.unparse(node.args[0])})")
            if "seed" in name and len(node.args) > 1:
                start, end = span(node.args[-1])
                yield mutant(node, "seed", start, end, "0")


def executed(tree: ast.AST) -> Iterator[ast.expr]:
    """Expressions whose value matters: no annotations, messages of errors, help of options or decorators."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import):
                continue
            if isinstance(child, ast.expr):
                yield child
            yield from executed(child)


def all_mutants() -> list[Mutant]:
    listed = subprocess.run(["git", "ls-files", *SOURCES], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name for name in listed.stdout.splitlines() if name.endswith(".py")]
    return [mutant for file in files for mutant in mutants_in(file, (ROOT / file).read_text())]


def text_of(mutant: Mutant) -> str:
    """The line that it changes."""
    return (ROOT / mutant.file).read_text().splitlines()[mutant.line - 1].strip()


def drawn(count: int, seed: int) -> list[Mutant]:
    """Mutants by lot: a folder in turn, a kind of change, a place."""
    by_folder: dict[str, list[Mutant]] = {}
    for mutant in all_mutants():
        by_folder.setdefault(str(Path(mutant.file).parent), []).append(mutant)
    lot = random.Random(seed)
    folders = sorted(by_folder)
    lot.shuffle(folders)
    chosen: list[Mutant] = []
    for folder in cycle(folders):
        if len(chosen) == count:
            return chosen
        kind = lot.choice(sorted({mutant.kind for mutant in by_folder[folder]}))
        mutant = lot.choice([mutant for mutant in by_folder[folder] if mutant.kind == kind])
        if mutant not in chosen:
            chosen.append(mutant)
    return chosen


def drawn_again(earlier: Path) -> list[Mutant]:
    """The mutants of an earlier run's lines, in today's tree; what is not there any more is named and left out."""
    by_change: dict[tuple[str, str, str], list[Mutant]] = {}
    for mutant in all_mutants():
        by_change.setdefault((mutant.kind, mutant.before.strip(), mutant.after.strip()), []).append(mutant)
    again = []
    for line in earlier.read_text().splitlines():
        old = json.loads(line)
        places = by_change.get((old["kind"], old["before"].strip(), old["after"].strip()), [])
        same = [mutant for mutant in places if text_of(mutant) == old["text"]]
        here = [mutant for mutant in same if Path(mutant.file).name == Path(old["file"]).name] or same
        if here:
            again.append(here[0])
        else:
            print(f"GONE  {old['file']}:{old['line']} {old['text']}")
    return again


def tests_of_lines(coverage_file: Path) -> dict[str, dict[int, list[str]]]:
    """The tests that reach each line of each source, from the root."""
    import coverage

    data = coverage.CoverageData(str(coverage_file))
    data.read()
    reached = {}
    for file in data.measured_files():
        lines = data.contexts_by_lineno(file).items()
        tests = {line: sorted({name.rpartition("|")[0] for name in names if name}) for line, names in lines}
        reached[os.path.relpath(file, ROOT)] = tests
    return reached


def measure_coverage(file: Path) -> None:
    """Runs the suite once and notes which test reaches which line, in forked processes too."""
    command = [sys.executable, "-m", "pytest", "-q", "--numprocesses", "auto", "--dist", "worksteal"]
    command += [*(f"--cov={source}" for source in SOURCES), "--cov-context=test", "--cov-report="]
    subprocess.run(command, cwd=ROOT, env=environment(ROOT, file), check=False)


def environment(tree: Path, coverage_file: Path | None = None) -> dict[str, str]:
    paths = os.pathsep.join([str(tree), str(tree / "kernels")])
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return os.environ | own | ({"COVERAGE_FILE": str(coverage_file)} if coverage_file else {})


def is_found(mutant: Mutant, tests: Sequence[str], tree: Path) -> str | None:
    """The first line of a failing test's report, or None if all pass."""
    path = tree / mutant.file
    text = path.read_text()
    path.write_text(text[: mutant.start] + mutant.after + text[mutant.end :])
    folder = "tests/" + mutant.file.removeprefix("kernels/fastp3o_").rpartition("/")[0]
    near_first = sorted(tests, key=lambda test: not test.startswith(folder))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--numprocesses", "2", "-p", "no:cacheprovider", *near_first]
    try:
        ran = subprocess.run(command, cwd=tree, env=environment(tree), capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return "the tests hang"
    finally:
        path.write_text(text)
    failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if "ERROR: not found" in ran.stderr + ran.stdout:
        raise RuntimeError(f"tests of the map are gone: {ran.stderr[-300:]}")
    return (failed or [ran.stdout[-200:]])[0][:200] if ran.returncode else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coverage", type=Path, default=None, help="a map of coverage that is there")
    parser.add_argument("--again", type=Path, default=None, help="lines of an earlier run")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"), help="a line for each mutant")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        coverage_file = arguments.coverage or Path(folder) / "coverage"
        if arguments.coverage is None:
            measure_coverage(coverage_file)
        reached = tests_of_lines(coverage_file)
        tree = Path(folder) / "tree"
        # The folder of tests has one with the name of the quickstarts' folder.
        shutil.copytree(ROOT, tree, ignore=lambda at, names: {".git", ".venv", *({"runs"} if at == str(ROOT) else ())})
        mutants = drawn_again(arguments.again) if arguments.again else drawn(arguments.count, arguments.seed)
        found = 0
        for mutant in mutants:
            tests = reached.get(mutant.file, {}).get(mutant.line, [])
            by = is_found(mutant, tests, tree) if tests else None
            found += by is not None
            with arguments.out.open("a") as file:
                line = asdict(mutant) | {"text": text_of(mutant), "tests": len(tests), "found": by}
                file.write(json.dumps(line) + "\n")
            where = f"{mutant.file}:{mutant.line} {mutant.kind}: {mutant.before.strip()} -> {mutant.after.strip()}"
            print(f"{'found' if by else 'LIVES'} ({len(tests)} tests)  {where}", flush=True)
        print(f"{found} of {len(mutants)} mutants are found")


if __name__ == "__main__":
    main()
