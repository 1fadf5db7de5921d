"""Prompts, demonstrations and preference pairs, from the hub or from files, as token ids. README.md is for users.

errors.py         messages about data that cannot be used
sources.py        a hub name or a path -> records, each with its file and number
layouts.py        a record -> a prompt and its responses, as text or messages
chat_template.py  messages -> text, in which only the template's own special tokens count
columns.py        what is kept of a record as it is: further fields that rewards ask for, and the prompt
encoding.py       texts or messages -> token ids
time_limit.py     an end to a template that has none
loading.py        all of it: the loaders, from source to data set of examples
"""

from fastp3o.data.errors import DataError
from fastp3o.data.loading import (
    DataReport,
    load_demonstrations,
    load_preferences,
    load_prompts,
    load_rankings,
    load_unpaired_preferences,
)

__all__ = [
    "DataError",
    "DataReport",
    "load_demonstrations",
    "load_preferences",
    "load_prompts",
    "load_rankings",
    "load_unpaired_preferences",
]
