"""Trajectories whose turns are sampled by servers. Each continues as soon as its turn has arrived."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import cycle
from typing import Any

from fastp3o.calls.function import Background
from fastp3o.packing.seeds import derived_seed
from fastp3o.rollouts.groups import Group, Prompt
from fastp3o.rollouts.turns.sampler import TURNS, Trajectory, TrajectorySampler
from fastp3o.rollouts.vllm.sampler import VLLMSampler
from fastp3o.rollouts.vllm.servers import Question
from fastp3o.runtime.processes import on_every_process


class ServedTrajectories(TrajectorySampler):
    """A Sampler of trajectories, called by all processes. Servers keep the weights for a whole
    call, or interrupt it.

    All turns of a prompt go to one server, which has what came before in its prefix cache.
    Environments answer together the turns that have come meanwhile. The tokenizer must be its own:
    a call that was begun has a thread of its own. turns: samples one.
    """

    def __init__(self, turns: VLLMSampler, *others: Any, **limits: Any):
        super().__init__(turns, turns, *others, **limits)
        self.turns, self.publish, self.stop = turns, turns.publish, turns.stop

    def __call__(self, prompts: list[Prompt], responses_per_prompt: int, seed: int) -> list[Group]:
        """Calls environments in this thread. Raises EndpointError or FunctionError on all
        processes.
        """
        self.publish()
        sample = partial(super().__call__, prompts, responses_per_prompt, seed)
        return on_every_process(self.publish.accelerator, sample)

    def begin(
        self, prompts: list[Prompt], responses_per_prompt: int, seed: int
    ) -> Callable[[], list[Group]]:
        """Starts a call, and returns a function that waits for its result."""
        self.publish()
        sampled = Background(partial(super().__call__, prompts, responses_per_prompt, seed)).result
        servers = self.publish.servers
        servers.calls = [*(one for one in servers.calls if not one.done()), sampled]
        return lambda: on_every_process(self.publish.accelerator, sampled.result)

    def finish(self, live: list[Trajectory], K: int, seed: int) -> None:
        servers = self.publish.servers
        answers = servers.complete([], self.turns.settings | {"n": K}, self.turns.ends.ids)
        prompts = (live[n : n + K] for n in range(0, len(live), K))
        answers.add(map(partial(self.question, seed), prompts, cycle(servers.present)))
        with closing(answers.lists()) as lists:
            for come in lists:
                self.take(
                    [one for (alike, _), _ in come for one in alike],
                    [
                        response
                        for (alike, _), completions in come
                        for response in self.turns.responses(alike[0].context(), completions)
                    ],
                )
                further = (
                    ([one], server) for (alike, server), _ in come for one in alike if not one.over
                )
                answers.add(self.question(seed, *turn) for turn in further)

    def question(self, seed: int, alike: list[Trajectory], server: str) -> Question:
        """The request for a turn of trajectories that do not differ: at first all of a prompt,
        later each alone.
        """
        one, turn = alike[0], len(alike[0].turns)
        seed, number = (
            (derived_seed(seed, TURNS, turn), one.number) if turn else (seed, one.prompt.number)
        )
        room = min(self.turns.settings["max_tokens"], self.longest - len(one.ids))
        own = {"n": len(alike), "max_tokens": room}
        return Question((alike, server), one.context().ids, derived_seed(seed, number), server, own)
