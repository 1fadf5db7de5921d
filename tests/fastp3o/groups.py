"""Prompts and groups for tests."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from fastp3o.rollouts.groups import Group, Prompt, Response, token_ids


def tokenized(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], numbers: Sequence[int] = ()
) -> list[Prompt]:
    """numbers: of the prompts; by default they are counted from 0."""
    ids = tokenizer(list(texts)).input_ids
    return [
        Prompt(*prompt) for prompt in zip(texts, ids, numbers or range(len(texts)), strict=True)
    ]


def groups_of_ids(
    prompt_ids: Sequence[list[int]], response_ids: Sequence[Sequence[list[int]]]
) -> list[Group]:
    """Finished responses without texts."""
    return [
        Group(Prompt("", prompt, number), [Response(ids, "", True) for ids in group])
        for number, (prompt, group) in enumerate(zip(prompt_ids, response_ids, strict=True))
    ]


def groups_of_texts(*groups: Sequence[str], **columns: list) -> list[Group]:
    """Finished responses with these texts to `prompt 0`, `prompt 1`, ... columns: one value a
    prompt.
    """
    return [
        Group(
            Prompt(
                f"prompt {number}",
                [1],
                number,
                {name: values[number] for name, values in columns.items()},
            ),
            [Response([1], text, True) for text in group],
        )
        for number, group in enumerate(groups)
    ]


def flat(groups: Sequence[Group]) -> list[Response]:
    return [response for group in groups for response in group.responses]


def response_ids(groups: Sequence[Group]) -> list[list[list[int]]]:
    return token_ids(groups)[1]
