"""What is public is on one page, is there, and is all that pages and examples use."""

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastp3o.rewards.function import FunctionReward
from fastp3o.rollouts.groups import Group, Prompt, Response

ROOT = Path(__file__).parents[1]
SECTION = (
    (ROOT / "fastp3o" / "README.md")
    .read_text()
    .partition("## What is public\n")[2]
    .partition("\n## ")[0]
)
MODULES = re.findall(r"`(fastp3o\w*(?:\.\w+)*)`", SECTION)
HOSTS = {f"fastp3o.integrations.{name}" for name in ("trl", "verl", "openrlhf")}
EXAMPLES = sorted((ROOT / "scripts" / "examples").glob("*.py"))
PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *(
            page
            for folder in ("fastp3o", "kernels", "scripts", "benchmarks", ".github")
            for page in (ROOT / folder).rglob("*.md")
        ),
    }
)


def public_names(module: str) -> list[str]:
    """`__all__` as it is written, where the module needs a trainer that may not be installed, or
    else as it is.
    """
    if module not in HOSTS:
        return list(importlib.import_module(module).__all__)
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    for node in ast.parse(Path(found.origin).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{module} has no __all__")


def ours(code: str) -> Iterator[tuple[str, str]]:
    """Modules of ours, with the names that code imports from them."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (
                (alias.name, "") for alias in node.names if alias.name.startswith("fastp3o")
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fastp3o"):
            yield from ((str(node.module), alias.name) for alias in node.names)


def test_the_page_is_short_and_names_modules_whose_names_exist():
    assert len(SECTION.strip().splitlines()) <= 17
    assert len(MODULES) == 9
    for module in MODULES:
        names = public_names(module)
        assert names == sorted(set(names)), module
        if module not in HOSTS:
            assert not [
                name for name in names if not hasattr(importlib.import_module(module), name)
            ], module


@pytest.mark.parametrize("path", [*PAGES, *EXAMPLES], ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_and_examples_import_public_names_alone(path: Path):
    text = path.read_text()
    blocks = [text] if path.suffix == ".py" else re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for module, name in (imported for code in blocks for imported in ours(code)):
        assert module in MODULES, f"import of {module}"
        assert not name or name in public_names(module), f"{module} has no public {name}"
    if path.suffix == ".md":
        # As a flag takes it, and as Python does: `fastp3o.rewards.verifiable:exact_match`,
        # `fastp3o.train`.
        for module, name in re.findall(r"\b(fastp3o\w*(?:\.\w+)*):([A-Za-z_]\w*)", text):
            assert name in public_names(module), f"{module}:{name}"


def test_a_reward_function_gets_what_the_page_says():
    (row,) = (line for line in SECTION.splitlines() if "reward function" in line)
    names = re.findall(r"`(\w+)`", row)
    assert names == ["prompts", "responses", "completions", "completion_ids", "log_metric"]
    got = {}

    def score(prompts, responses, answer, completion_ids, log_metric):
        got.update(
            prompts=prompts, responses=responses, completion_ids=completion_ids, answer=answer
        )
        log_metric("seen", 1)
        return [1.0] * len(responses)

    def in_trls_form(completions, **others):
        got.update(completions=completions, **others)
        return [1.0] * len(completions)

    group = Group(
        Prompt("1+1=", [5, 6], 0, {"answer": 2}),
        [Response([7], "2", True), Response([8], "3", True)],
    )
    for function in (score, in_trls_form):
        reward = FunctionReward("tests:f", None, function)
        assert reward([group]).tolist() == [[1.0, 1.0]]
    assert reward.logs
    assert {*names, "answer"} <= got.keys() | {"log_metric"}
    assert (got["completion_ids"], got["completions"], got["answer"]) == (
        [[7], [8]],
        ["2", "3"],
        [2, 2],
    )
