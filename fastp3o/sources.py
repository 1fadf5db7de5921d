"""What an option names: text as flags and files have it, an object in a program's memory, or a
model at a revision.

`train` puts objects in place of texts, a configuration says which revision of a model is meant,
and whatever loads takes a source as it comes. `str(source)` is its name, for messages, logs and
files.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False, repr=False)
class InMemory:
    """An object that a caller from Python has in place of an option's text. name: what stands
    for it in text.
    """

    name: str
    value: Any

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return repr(self.name)


@dataclass(frozen=True)
class HubRef:
    """A model of the hub at a revision: a branch, a tag or a commit."""

    name: str
    revision: str

    def __str__(self) -> str:
        return self.name


Source = str | InMemory  # of data, a reward or an environment
ModelSource = str | HubRef | InMemory


def revised(model: Source, revision: str | None) -> ModelSource:
    """A model at a revision of the hub, or as it is without one."""
    return HubRef(str(model), revision) if revision else model
