"""What we hand through a model of transformers has names that none of its layers takes for its own."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import transformers

from fastp3o.models.attention import segment_attention
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o_kernels.exposed_head import with_head_loss
from tests.fastp3o.groups import tokenized
from tests.fastp3o.models.model_families import PAIRS, random_model

TRANSFORMERS = Path(transformers.__file__).parent


def keyword_only(function) -> set[str]:
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


TO_ATTENTION = keyword_only(segment_attention)
TO_THE_MODEL = keyword_only(with_head_loss(lambda: None))


def forward_parameters(source: str) -> set[str]:
    """Names of the parameters of all functions `forward` in a module's source, of layers and of
    whole models.
    """
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    arguments = (node.args for node in functions if node.name == "forward")
    return {
        one.arg
        for given in arguments
        for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)
    }


def taken(names: set[str], folder: Path) -> Iterator[tuple[str, str]]:
    """Files below the folder with a `forward` that has some of the parameters, and which."""
    pattern = re.compile(rf"\b({'|'.join(names)})\b")
    for file in sorted(folder.rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        if pattern.search(source):  # most files are not parsed
            yield from ((file.name, name) for name in sorted(names & forward_parameters(source)))


def test_no_layer_of_transformers_takes_our_keywords_for_its_own():
    llama = TRANSFORMERS / "models" / "llama"
    assert ("modeling_llama.py", "position_embeddings") in set(
        taken({"position_embeddings"}, llama)
    )
    assert not list(taken(TO_ATTENTION | TO_THE_MODEL, TRANSFORMERS))


def test_what_a_model_gets_of_ours_is_what_the_test_above_looks_for(tokenizer):
    """In passes over packed rows, and in rollouts, which fill a cache and then continue it."""
    policy = PackedModel(random_model("llama", vocab_size=len(tokenizer)))
    body, seen = policy.model.base_model, set()
    body.register_forward_pre_hook(
        lambda module, args, options: seen.update(options), with_kwargs=True
    )
    labeled_logprobs(policy, PAIRS.row())
    sampler = EngineSampler(policy, tokenizer, max_response_tokens=3, batch_size=2)
    sampler(tokenized(tokenizer, ["one", "other"], range(2)), 2, 0)
    assert seen - inspect.signature(type(body).forward).parameters.keys() == TO_ATTENTION
