"""What is kept of the prompts' records beside token ids: any JSON value, exactly, as JSON text."""

import json
from collections.abc import Mapping

from fastp3o.data.errors import Found, RecordError, field_names
from fastp3o.data.layouts import Message

PROMPT_COLUMNS = ("prompt", "prompt_ids", "given")

# Names of fields, each with what asks for it, in words of a message.
Asked = Mapping[str, str]


def column_texts(record: Mapping, asked: Asked) -> dict[str, str]:
    """The fields as JSON text. Raises RecordError where one is missing, null, or nothing that JSON has."""
    texts = {}
    for name, asker in asked.items():
        value = record.get(name)
        if value is None:
            found = "null" if name in record else f"nothing: the record has {field_names(record)}"
            raise RecordError(name, f"a value, which {asker} asks for", Found(found))
        try:
            texts[name] = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RecordError(name, f"a value that JSON has, which {asker} asks for", value) from error
    return texts


def prompt_text(prompt: str | list[Message], field: str) -> str:
    """A prompt as JSON text. Raises RecordError where a message holds something that no line of a file can."""
    for number, message in enumerate([] if isinstance(prompt, str) else prompt):
        for name, value in message.items():
            try:
                json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            except (TypeError, ValueError, RecursionError) as error:
                raise RecordError(f"{field}[{number}].{name}", "a value that JSON has, in UTF-8", value) from error
    return json.dumps(prompt, ensure_ascii=False)


def column_values(examples: Mapping[str, list]) -> dict[str, list]:
    """Of a batch of examples, what the records had in the fields that were kept."""
    return {
        name: [json.loads(text) for text in texts] for name, texts in examples.items() if name not in PROMPT_COLUMNS
    }
