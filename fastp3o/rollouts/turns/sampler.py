"""Trajectories: turns of the policy, each answered by an environment, as responses of one piece.

They go in rounds: each trajectory that is not over samples a turn, then all environments answer.
Token ids are only ever put one after the other, so that what trains is what was sampled, token by
token.
"""

import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from fastp3o.calls.function import FunctionError
from fastp3o.data.tokens import Continuation
from fastp3o.packing.packed_row import Ids
from fastp3o.packing.seeds import derived_seed
from fastp3o.rollouts.groups import Group, Prompt, Response, Sampler, Turn
from fastp3o.rollouts.turns.calls import Call
from fastp3o.rollouts.turns.environment import Environments
from fastp3o.rollouts.turns.observation import Observe, longest_text

# Sets the seeds of further turns apart from those of minibatches and evaluations.
TURNS = 2**32 - 5


@dataclass
class Trajectory:
    """A trajectory that grows. ids: after the prompt, a first observation among them. logprobs: of
    the policy's tokens; None if the sampler gives none.
    """

    prompt: Prompt
    number: int
    environment: Any
    ids: Ids
    logprobs: array | None = field(default_factory=lambda: array("f"))
    turns: list[Turn] = field(default_factory=list)
    done: bool = False  # the environment says so
    over: bool = False  # done, out of turns or of tokens, or its environment failed

    def context(self) -> Prompt:
        """What the next turn continues, as a prompt."""
        return self.prompt._replace(ids=self.prompt.ids + self.ids)

    def add_turn(self, response: Response, room: int) -> None:
        """room: tokens that the trajectory may still have. The beginning of a turn is a sample of
        the policy, too.
        """
        start, kept = len(self.ids), response.ids[:room]
        self.ids = self.ids + kept
        self.turns.append(Turn(start, len(self.ids)))
        if self.logprobs is not None:
            self.logprobs = (
                None
                if response.logprobs is None
                else self.logprobs + array("f", response.logprobs[:room])
            )
        # The half of a command that was cut off is not carried out.
        self.over = not response.finished or len(kept) < len(response.ids)


class TrajectorySampler:
    """A Sampler whose responses are trajectories. first, further: samplers of a turn; further ones
    have a response to each of up to P K contexts. longest: tokens of a trajectory, observations
    included. end: called after the last turn, also after an error.
    """

    def __init__(
        self,
        first: Sampler,
        further: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        environments: Environments,
        observe: Observe,
        *,
        max_turns: int,
        longest: int,
        end: Callable[[], None] = lambda: None,
    ):
        self.first, self.further, self.tokenizer = first, further, tokenizer
        self.environments = environments
        self.observe = observe
        self.max_turns = max_turns
        self.longest = longest
        self.end = end
        self.fails = False  # whether all environments that were asked have failed in the last call

    @cached_property
    def continuation(self) -> Continuation:
        return Continuation(self.tokenizer)

    def __call__(self, prompts: list[Prompt], responses_per_prompt: int, seed: int) -> list[Group]:
        """Raises FunctionError if an environment fails, or begins trajectories of one prompt in
        different ways.
        """
        K = responses_per_prompt
        records = [
            {"prompt": prompt.text, **prompt.columns} for prompt in prompts for _ in range(K)
        ]
        environments, texts = self.environments.begin(records)
        try:
            first = [
                self.first_observation(one, texts[p * K : (p + 1) * K])
                for p, one in enumerate(prompts)
            ]
            trajectories = [
                Trajectory(
                    prompts[n // K],
                    prompts[n // K].number * K + n % K,
                    environments[n],
                    first[n // K],
                )
                for n in range(len(prompts) * K)
            ]
            self.finish(trajectories, K, seed)
        finally:
            self.end()
            self.environments.close(environments)
        self.tell_failures(trajectories)
        whole = [self.continuation.text(one.ids, one.prompt.ids[-1]) for one in trajectories]
        finished = [
            Response(one.ids, text, one.done, one.logprobs, tuple(one.turns))
            for one, text in zip(trajectories, whole, strict=True)
        ]
        return [Group(prompt, finished[p * K : (p + 1) * K]) for p, prompt in enumerate(prompts)]

    def first_observation(self, prompt: Prompt, texts: list[str]) -> Ids:
        """The first observation of a prompt's trajectories. Raises FunctionError if they differ, or
        if it leaves no room for a turn.
        """
        text, *others = dict.fromkeys(texts)
        name = f"{self.environments.name}.reset"
        if others:
            raise FunctionError(
                f"{name} must return the same first observation for all trajectories of a prompt, since they are "
                f"compared; it returned {text!r:.60} and others for one record"
            )
        observed = self.observed(text, prompt.ids[-1], self.longest, prompt.given) if text else []
        if observed is None:
            limit = f"more than there is room for, and --max_response_tokens is {self.longest}"
            raise FunctionError(f"{name} has returned {len(text)} characters, {limit}")
        return observed

    def observed(self, text: str, last: int, room: int, given: str) -> Ids | None:
        """The ids of an observation; None if they leave no room for a token of the policy."""
        if len(text) > longest_text(room):  # one of so many characters has more tokens
            return None
        ids = self.observe(text, last, given, room=room)
        return ids if len(ids) < room else None

    def tell_failures(self, trajectories: list[Trajectory]) -> None:
        """Warns once if no environment has answered, until one answers again: such a run learns
        nothing.
        """
        failures = [one.turns[-1].failure for one in trajectories if one.turns[-1].failure]
        answered = any(
            one.done or len(one.turns) > 1 or one.turns[-1].rewards for one in trajectories
        )
        before, self.fails = self.fails, bool(failures) and not answered
        if self.fails and not before:
            asked = (
                f"all of {len(failures)} trajectories that have asked it (--environment_errors end)"
            )
            print(
                f"warning: {self.environments.name} has failed in {asked}: {failures[0]}",
                file=sys.stderr,
            )

    def finish(self, live: list[Trajectory], K: int, seed: int) -> None:
        """Samples all turns. The K trajectories of a prompt are adjacent."""
        contexts = [one.context() for one in live[::K]]
        responses = [r for group in self.first(contexts, K, seed) for r in group.responses]
        for turn in range(1, self.max_turns + 1):
            self.take(live, responses)
            live = [trajectory for trajectory in live if not trajectory.over]
            if not live:
                break
            contexts = [Prompt("", one.context().ids, one.number) for one in live]
            groups = self.further(contexts, 1, derived_seed(seed, TURNS, turn))
            responses = [group.responses[0] for group in groups]

    def said(self, trajectory: Trajectory, response: Response) -> str | list[Call]:
        """What the environment gets of a trajectory's last turn: its text, or the calls in it."""
        if self.environments.read_calls is None:
            return response.text
        before = trajectory.prompt.ids + trajectory.ids[: trajectory.turns[-1].start]
        return self.environments.read_calls(before, response.ids)

    def take(self, live: list[Trajectory], responses: list[Response]) -> None:
        """Appends a turn to each trajectory, and its environment's answer."""
        for trajectory, response in zip(live, responses, strict=True):
            trajectory.add_turn(response, self.longest - len(trajectory.ids))
        answered = [
            (one, response) for one, response in zip(live, responses, strict=True) if not one.over
        ]
        said = [self.said(*turn) for turn in answered]
        steps = self.environments.step([one.environment for one, _ in answered], said)
        for (trajectory, _), step in zip(answered, steps, strict=True):
            trajectory.turns[-1] = trajectory.turns[-1]._replace(
                rewards=step.rewards, failure=step.failure
            )
            trajectory.done = step.done and not step.failure
            # An observation that nothing answers is left out: a trajectory ends with a token of the
            # policy.
            goes_on = not step.done and len(trajectory.turns) < self.max_turns
            room = self.longest - len(trajectory.ids)
            text, record = step.observation, trajectory.prompt.given
            observed = self.observed(text, trajectory.ids[-1], room, record) if goes_on else None
            trajectory.over = observed is None
            if observed is not None:
                trajectory.ids = trajectory.ids + observed
