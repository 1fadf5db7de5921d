"""Whether a response that is written as data is read again as the tokens that were sampled.

Texts lose what was sampled: special tokens, bytes that are no character, tokens that the tokenizer
would not choose. A chat template trims a reply or moves its thinking. Whoever trains on such a
record learns something that no reward saw.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fastp3o.data.encoding import Encoded, Encoder, Texts
from fastp3o.data.errors import RecordError
from fastp3o.data.layouts import in_prompt_form, prompt_field, response_field
from fastp3o.data.tokens import text_of_ids
from fastp3o.rollouts.groups import Response

# For the fields of a prompt's record and responses to it: whether each is read back.
ReadsBack = Callable[[Mapping[str, Any], list[Response]], list[bool]]


def reads_back(encoder: Encoder) -> ReadsBack:
    """Reads as the other stages do. encoder: theirs, with the limits of the prompts and none of
    responses.
    """

    def rendered(given: Mapping[str, Any], texts: list[str]) -> list[Texts | None]:
        """Each response with the prompt; None for one that no stage would take."""
        names = [f"completion[{number}]" for number in range(len(texts))]
        record = {
            **given,
            **{n: in_prompt_form(given["prompt"], t) for n, t in zip(names, texts, strict=True)},
        }
        try:
            parts = tuple(response_field(record, name) for name in names)
            together = encoder.render(prompt_field(record), parts, record)
        except RecordError:
            return (
                [None]
                if len(texts) == 1
                else [one for text in texts for one in rendered(given, [text])]
            )
        fields = list(zip(together.responses, together.fields[1:], strict=True))
        return [
            together._replace(responses=(text,), fields=("prompt", field)) for text, field in fields
        ]

    def same(encoded: Encoded | RecordError, response: Response) -> bool:
        """All but the end, before which a template may write white space."""
        if isinstance(encoded, RecordError):
            return False
        (read,) = encoded.response_ids
        ended = response.finished and response.ids[-1] in encoder.special_ids
        sampled = response.ids[:-1] if ended else response.ids
        after = [number for number in read[len(sampled) :] if number not in encoder.special_ids]
        return read[: len(sampled)] == sampled and not text_of_ids(encoder.tokenizer, after).strip()

    def check(given: Mapping[str, Any], responses: list[Response]) -> list[bool]:
        texts = rendered(given, [response.text for response in responses])
        encoded = iter(encoder.encode([text for text in texts if text is not None]))
        return [
            text is not None and same(next(encoded), r)
            for text, r in zip(texts, responses, strict=True)
        ]

    return check
