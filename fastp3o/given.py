"""Objects from a caller in Python, in the place of names in the configuration: data, rewards, callbacks."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fastp3o.data.sources import Records
from fastp3o.rewards.reward import Reward

# Gets the metrics of a step, or of an evaluation, with `step`. If it returns True, the run ends there.
Callback = Callable[[dict[str, Any]], bool | None]


class Given(NamedTuple):
    """data: by option. rewards: by the name that the configuration has for them. on_update: called after each step of
    the loop. on_evaluation: after each evaluation. program_goes_on: whether another run may follow in these processes:
    a process group that was destroyed cannot be joined again safely. base: what a loaded model came from, "" if nobody
    knows; None if the configuration names the model.
    """

    data: Mapping[str, Records] = {}
    rewards: Mapping[str, Reward] = {}
    on_update: Callback | None = None
    on_evaluation: Callback | None = None
    program_goes_on: bool = False
    base: str | None = None


NOTHING = Given()
