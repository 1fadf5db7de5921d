"""Builds a small summarization data set like TL;DR from the docstrings of the Python installation
that runs it.

The post is the body of a docstring, the summary its first sentence. Sources are parsed with `ast`
and never imported. The script needs no network: the standard library suffices, and installed
packages (torch first) add to it.

    python scripts/make_docstring_tldr.py --output_dir runs/docstrings

Each split (train, eval) gets three JSON Lines files: sft.*.jsonl (prompt, label),
preferences.*.jsonl (prompt, chosen, rejected) and prompts.*.jsonl (prompt). A tokenizer is to be
trained on the text of sft.train.jsonl. The same interpreter with the same packages and seed writes
the same bytes.
"""

import argparse
import ast
import gc
import hashlib
import itertools
import json
import os
import random
import re
import sys
import sysconfig
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MIN_PROSE_WORDS = 8  # a bare list of parameters is no post
FIRST_PACKAGES = ("torch", "numpy")
# Docstrings of tests repeat each other; the other folders hold copies of packages.
SKIPPED_FOLDERS = {
    *(
        "test",
        "tests",
        "testing",
        "_testing",
        "idlelib",
        "lib2to3",
        "turtledemo",
        "site-packages",
        "dist-packages",
    ),
    *(
        "_vendor",
        "_vendored_packages",
        "vendor",
        "vendored",
        "extern",
        "third_party",
        "__pycache__",
    ),
}

# Nearly all usable docstrings have a blank line after the summary. Files without one need not be
# parsed.
SUMMARY_THEN_BLANK = re.compile(rb"(\"\"\"|''')\s*[^\n]+(\n[^\n]+)?\n[ \t]*\n")

# Sections with sentences about arguments and results are kept; the others hold code or names.
KEPT_SECTION = re.compile(
    r"^(?:args|arguments?|parameters?|params|other parameters|keyword arg(?:ument)?s|kwargs|returns?|yields?|raises?|"
    r"attributes|inputs?|outputs?|notes?|warnings?)\s*:{0,2}$",
    re.IGNORECASE,
)
DROPPED_SECTION = re.compile(
    r"^(?:(?:basic |simple |for |this |code )?examples?(?: usage)?|see also|references?|methods|usages?|shapes?|todos?|"
    r"variables|outline|aliases|synopsis|version|authors?|license|copyright|history|warns)\b[^.]*?:{0,2}$",
    re.IGNORECASE,
)
UNDERLINE = re.compile(r"^[-=~^*]{3,}$")
LIST_ITEM = re.compile(r"^(?:[-*+•] |\(?\d+[.)] |\(?[a-z][.)] |:\w[^:]*:)")
CODE = re.compile(
    r">>>|::|\w\([^)]*\)\s*=|[{}<>\\^|]|==|->|\w = \w|\bself\.|\bimport \w+ as\b|"
    r"^\s*(?:\$|%|\.\. |\.\.\.|@\w|#|\||~)",
    re.MULTILINE,
)
ROLE = re.compile(r":(?:\w+:)+`~?([^`<]+?)(?:\s*<[^>]*>)?`")
EMPHASIS = re.compile(r"(?<!\w)\*{1,2}(\w+)\*{1,2}(?!\w)")
FOOTNOTE = re.compile(r"\s*\[\w+\]_")
ENTRY = re.compile(r"^[\w*., ]{1,60}(?:\([^:]*\)|\[[^:]*\])?\s*:(?:\s|$)|^[\w.]+ -- ")
SIGNATURE = re.compile(r"^[\w.]+\s*\([^)]*\)\s*(?:->|--|:|=|$)|^\w+ ?(?:\(.*\))? ?:|^\w+ -- ")
SENTENCE_BREAK = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)\s+(?=[A-Z])")
SENTENCE_END = (".", "!", "?")


@dataclass(frozen=True)
class Bounds:
    """Limits on the lengths of post and summary, in words."""

    min_body: int
    max_body: int
    min_summary: int
    max_summary: int


class Pair(NamedTuple):
    """A docstring as post and summary, with the dotted name of what it documents."""

    module: str
    name: str
    body: str
    summary: str

    @property
    def prompt(self) -> str:
        return f"MODULE: {self.module}\n\nNAME: {self.name}\n\nPOST: {self.body}\n\nTL;DR:"

    @property
    def response(self) -> str:
        return f" {self.summary}"


class Source(NamedTuple):
    """A tree of Python files and the pairs found in it; `unreadable` files cannot be parsed."""

    name: str
    files: int
    unreadable: int
    pairs: list[Pair]


# --- from a docstring to a pair -------------------------------------------------------------------


def plain(text: str) -> str:
    """One line, without reStructuredText roles and quotes around names."""
    text = FOOTNOTE.sub("", EMPHASIS.sub(r"\1", ROLE.sub(r"\1", text)))
    return " ".join(text.replace("``", "").replace("`", "").split())


def is_text(block: str) -> bool:
    """Whether a block is text, not code, a table or a formula."""
    if not block.isascii() or CODE.search(block):
        return False
    letters = sum(character.isalpha() or character.isspace() for character in block)
    return letters >= 0.85 * len(block)


def is_prose(block: str) -> bool:
    """Whether a block without list marks consists of sentences."""
    return (
        block.endswith(SENTENCE_END)
        and len(block.split()) >= 5
        and block[0].isalnum() | (block[0] in "'\"(")
    )


def entries(lines: list[str], start: re.Pattern[str]) -> list[str]:
    """Joins the lines of each entry; one begins where `start` matches at the smallest indentation."""
    outermost = min(len(line) - len(line.lstrip()) for line in lines)
    grouped: list[list[str]] = []
    for line in lines:
        if not grouped or start.match(line[outermost:]):
            grouped.append([])
        grouped[-1].append(line)
    return [plain(" ".join(group)) for group in grouped]


class Block(NamedTuple):
    """Part of a docstring's body. prose: whether it is sentences, not a list or a section about
    arguments.
    """

    text: str
    prose: bool


def blocks(text: str) -> Iterator[Block]:
    """The readable blocks of a docstring's body: paragraphs, lists, and the sections that describe
    arguments.
    """
    section = title = ""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [
            line
            for line in paragraph.split("\n")
            if line.strip() and not UNDERLINE.match(line.strip())
        ]
        if not lines:
            continue
        heading = lines[0].strip()
        indented = lines[0].startswith((" ", "\t"))
        if DROPPED_SECTION.match(heading) and (
            len(lines) == 1 or heading.endswith(":") or "---" in paragraph
        ):
            section = "dropped"
            continue
        if KEPT_SECTION.match(heading):
            section = heading.rstrip(":").capitalize()
            title = f"{section}: "
            lines = lines[1:]
            indented = True
        elif section and not indented and "---" not in text:
            section = ""
        if section == "dropped" or (indented and not section) or not lines:
            continue
        if section:
            for entry in filter(is_text, entries(lines, ENTRY)):
                yield Block(f"{title}{entry}", False)
                title = ""
        elif any(LIST_ITEM.match(line.strip()) for line in lines):
            listed = "\n".join(entries(lines, LIST_ITEM))
            if is_text(listed):
                yield Block(listed, False)
        else:
            flush_left = plain(
                " ".join(itertools.takewhile(lambda line: not line.startswith((" ", "\t")), lines))
            )
            if is_text(flush_left) and is_prose(flush_left):
                yield Block(flush_left, True)


def split_summary(docstring: str) -> tuple[str, str]:
    """(first sentence, the rest)."""
    first, _, rest = docstring.strip().partition("\n\n")
    summary, *more = SENTENCE_BREAK.split(plain(first), maxsplit=1)
    return summary, "\n\n".join([*more, rest])


def is_summary(line: str, bounds: Bounds) -> bool:
    words = len(line.split())
    if not bounds.min_summary <= words <= bounds.max_summary or SIGNATURE.match(line):
        return False
    return is_text(line) and line[0].isalpha() and not line.endswith((":", ",", ";", "-"))


def readable_body(text: str, bounds: Bounds) -> str | None:
    """The leading blocks within the maximum length; None if they are too short or have too little
    prose.
    """
    kept: list[Block] = []
    words = 0
    for block in blocks(text):
        words += len(block.text.split())
        if words > bounds.max_body:
            break
        kept.append(block)
    body = "\n\n".join(block.text for block in kept)
    prose = sum(len(block.text.split()) for block in kept if block.prose)
    return body if len(body.split()) >= bounds.min_body and prose >= MIN_PROSE_WORDS else None


def docstring_pair(module: str, name: str, docstring: str, bounds: Bounds) -> Pair | None:
    """The pair of a docstring; None where it has no summary, no post, or a post that repeats the
    summary.
    """
    summary, rest = split_summary(docstring)
    if not is_summary(summary, bounds):
        return None
    body = readable_body(rest, bounds)
    if body is None or squeezed(summary) in squeezed(body):
        return None
    return Pair(module, name, body, summary if summary.endswith(SENTENCE_END) else summary + ".")


def squeezed(text: str) -> str:
    """Letters and digits only, so that near-identical texts compare equal."""
    return re.sub(r"[^a-z0-9]+", "", text.lower())


def documented(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(dotted name, docstring) of the module and of each function, method and class, in the order
    of the file.
    """
    if docstring := ast.get_docstring(tree):
        yield "(module)", docstring
    yield from definitions(tree, "")


def definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    for child in getattr(node, "body", []):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if docstring := ast.get_docstring(child):
                yield name, docstring
            yield from definitions(child, f"{name}.")
        elif isinstance(child, ast.If | ast.Try):
            yield from definitions(child, prefix)


# --- from a tree of files to pairs ----------------------------------------------------------------


def pairs_of_file(path: Path, module: str, bounds: Bounds) -> list[Pair] | None:
    """The pairs of one source file; None where it cannot be read or parsed."""
    try:
        source = path.read_bytes()
        if not SUMMARY_THEN_BLANK.search(source.replace(b"\r\n", b"\n")):
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = (
        docstring_pair(module, name, textwrap.dedent(text), bounds)
        for name, text in documented(tree)
    )
    return [pair for pair in found if pair is not None]


def python_files(root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    inside = (
        path
        for path in root.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    )
    return sorted(inside)


def module_name(path: Path, parent: Path) -> str:
    return ".".join(path.relative_to(parent).with_suffix("").parts).removesuffix(".__init__")


def source_trees() -> Iterator[tuple[str, Path, Path]]:
    """(name, root, folder that module names start from): the standard library, then packages,
    FIRST_PACKAGES first.
    """
    paths = sysconfig.get_paths()
    stdlib = Path(paths["stdlib"])
    yield "standard library", stdlib, stdlib
    installed = [
        paths["purelib"],
        paths["platlib"],
        *(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))),
    ]
    folders = [folder for folder in dict.fromkeys(map(Path, installed)) if folder.is_dir()]
    for folder in folders:
        for package in FIRST_PACKAGES:
            if (folder / package).is_dir():
                yield package, folder / package, folder
    for folder in folders:
        for entry in sorted(folder.iterdir()):
            known = entry.name in FIRST_PACKAGES or entry.name in SKIPPED_FOLDERS
            if not known and (entry.suffix == ".py" or (entry / "__init__.py").is_file()):
                yield entry.stem, entry, folder


class Distinct:
    """Filters out repeated summaries and bodies: inherited and copied docstrings occur many times."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, pairs: Iterable[Pair]) -> list[Pair]:
        return [pair for pair in pairs if self.is_new(pair)]

    def is_new(self, pair: Pair) -> bool:
        # Copies often differ in the last words, so only the first ones are compared.
        keys = {"summary " + squeezed(pair.summary)[:60], "body " + squeezed(pair.body)[:80]}
        if keys & self.seen:
            return False
        self.seen |= keys
        return True


def collect(max_pairs: int, bounds: Bounds, workers: int, stdlib_only: bool) -> list[Source]:
    """Reads one tree after another until there are `max_pairs` pairs."""
    sources: list[Source] = []
    distinct, missing = Distinct(), max_pairs
    # Syntax trees have no cycles, and the search for some takes a sixth of the time.
    with ProcessPoolExecutor(workers, initializer=gc.disable) as pool:
        for name, root, parent in source_trees():
            if missing <= 0 or (stdlib_only and sources):
                break
            files = python_files(root)
            modules = [module_name(path, parent) for path in files]
            results = list(
                pool.map(pairs_of_file, files, modules, [bounds] * len(files), chunksize=16)
            )
            pairs = distinct(pair for found in results for pair in found or ())[:missing]
            missing -= len(pairs)
            sources.append(Source(name, len(files), results.count(None), pairs))
    return sources


# --- preference pairs and splits ------------------------------------------------------------------


def other_line(pair: Pair, siblings: list[Pair], rng: random.Random) -> str | None:
    """The summary of another function of the same module: fluent, on topic, but wrong."""
    others = [sibling.response for sibling in siblings if sibling.summary != pair.summary]
    return rng.choice(others) if others else None


def truncated_line(pair: Pair, rng: random.Random) -> str:
    """The first words of the summary, a third to two thirds of them."""
    words = pair.summary.split()
    return " " + " ".join(
        words[: rng.randint(max(1, len(words) // 3), max(1, 2 * len(words) // 3))]
    )


def shuffled_line(pair: Pair, rng: random.Random) -> str:
    """The words of the summary in random order."""
    words = pair.summary.split()
    return " " + " ".join(rng.sample(words, len(words)))


def preferences(pairs: list[Pair], rng: random.Random) -> Iterator[dict[str, str]]:
    """Two records a pair: rejected are another function's line and a damaged copy (truncated and
    shuffled in turn).
    """
    by_module: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_module.setdefault(pair.module, []).append(pair)
    for index, pair in enumerate(pairs):
        damage = truncated_line if index % 2 else shuffled_line
        for rejected in (other_line(pair, by_module[pair.module], rng), damage(pair, rng)):
            if rejected is not None and rejected != pair.response:
                yield {"prompt": pair.prompt, "chosen": pair.response, "rejected": rejected}


def held_out_modules(pairs: list[Pair], seed: int, fraction: float) -> set[str]:
    """Modules with at least `fraction` of the pairs, held out whole: docstrings of one module
    resemble each other.
    """
    sizes = Counter(pair.module for pair in pairs)
    # Ordered by a hash, so that the modules of one package are not adjacent.
    order = sorted(sizes, key=lambda module: hashlib.sha256(f"{seed}:{module}".encode()).digest())
    held_out: set[str] = set()
    while order and sum(sizes[module] for module in held_out) < fraction * len(pairs):
        held_out.add(order.pop())
    return held_out


# --- files ----------------------------------------------------------------------------------------


def write_jsonl(path: Path, records: Iterable[dict[str, str]]) -> int:
    """Writes a temporary file and renames it, so that no interruption leaves half a file. Returns
    the count.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    count = 0
    try:
        with unfinished.open("w", encoding="utf-8") as lines:
            for record in records:
                lines.write(json.dumps(record, ensure_ascii=False) + "\n")
                count += 1
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def write_split(folder: Path, split: str, pairs: list[Pair], rng: random.Random) -> dict[Path, int]:
    """Writes the three files of a split in random order. Returns the number of records of each."""
    rng.shuffle(pairs)
    records = {
        "sft": ({"prompt": pair.prompt, "label": pair.response} for pair in pairs),
        "preferences": preferences(pairs, rng),
        "prompts": ({"prompt": pair.prompt} for pair in pairs),
    }
    paths = {kind: folder / f"{kind}.{split}.jsonl" for kind in records}
    return {path: write_jsonl(path, records[kind]) for kind, path in paths.items()}


def totals(sources: list[Source]) -> str:
    """Describes what was found in one line; the first source is the standard library."""
    library, *packages = (len(source.pairs) for source in sources)
    given = f", {sum(packages)} from {sum(map(bool, packages))} packages" if any(packages) else ""
    return f"{library + sum(packages)} docstrings with a summary: {library} from the standard library{given}"


def quartiles(values: list[int]) -> str:
    ordered = sorted(values)
    at = [ordered[round(q * (len(ordered) - 1))] for q in (0, 0.25, 0.5, 0.75, 1)]
    return "min {} / quarter {} / median {} / three quarters {} / max {}".format(*at)


def report(sources: list[Source], written: dict[Path, int]) -> None:
    """Prints what each source gave, how long the texts are, and what was written."""
    pairs = [pair for source in sources for pair in source.pairs]
    large = [source for source in sources if len(source.pairs) >= len(pairs) / 50]
    small = [source for source in sources if source not in large]
    print(f"{'source':<24}{'files':>8}{'unreadable':>12}{'pairs':>8}")
    for name, group in [
        *((source.name, [source]) for source in large),
        (f"{len(small)} smaller", small),
    ]:
        files = sum(source.files for source in group)
        unreadable = sum(source.unreadable for source in group)
        print(
            f"{name:<24}{files:>8}{unreadable:>12}{sum(len(source.pairs) for source in group):>8}"
        )
    print(f"words of a prompt:   {quartiles([len(pair.prompt.split()) for pair in pairs])}")
    print(f"words of a response: {quartiles([len(pair.response.split()) for pair in pairs])}")
    for path, count in written.items():
        print(f"{count:>8} records  {path}")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--output_dir", type=Path, required=True, help="folder of the files written"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the split, the order and the rejected lines"
    )
    parser.add_argument("--max_pairs", type=int, default=7000, help="stop after this many pairs")
    parser.add_argument(
        "--eval_fraction", type=float, default=0.05, help="share of the modules held out"
    )
    parser.add_argument("--min_body_words", type=int, default=20, help="shortest post, in words")
    parser.add_argument(
        "--max_body_words",
        type=int,
        default=130,
        help="longest post, in words; ends at a paragraph",
    )
    parser.add_argument(
        "--min_summary_words", type=int, default=3, help="shortest summary, in words"
    )
    parser.add_argument(
        "--max_summary_words", type=int, default=24, help="longest summary, in words"
    )
    parser.add_argument("--stdlib_only", action="store_true", help="read no installed package")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes that parse files"
    )
    options = parser.parse_args(arguments)
    if options.max_pairs < 2:
        parser.error("--max_pairs must be at least 2: one pair to train on and one to evaluate on")
    if not 0 < options.eval_fraction < 1:
        parser.error("--eval_fraction must lie between 0 and 1")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    bounds = Bounds(
        options.min_body_words,
        options.max_body_words,
        options.min_summary_words,
        options.max_summary_words,
    )
    sources = collect(options.max_pairs, bounds, options.workers, options.stdlib_only)
    pairs = [pair for source in sources for pair in source.pairs]
    held_out = held_out_modules(pairs, options.seed, options.eval_fraction)
    rng = random.Random(options.seed)
    written: dict[Path, int] = {}
    for split in ("train", "eval"):
        chosen = [pair for pair in pairs if (pair.module in held_out) == (split == "eval")]
        if not chosen:
            sys.exit(
                f"{len(pairs)} pairs leave none for the {split} split; raise --max_pairs or change --eval_fraction."
            )
        written |= write_split(options.output_dir, split, chosen, rng)
    print(totals(sources))
    report(sources, written)


if __name__ == "__main__":
    main()
