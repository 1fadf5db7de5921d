"""Trajectories: turns of the policy, each answered by an environment, as responses of one piece.

They go in rounds: each trajectory that is not over samples a turn, then all environments answer. Token ids are only
ever put one after the other, so that what trains is what was sampled, token by token.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from fastp3o.data.tokens import Continuation
from fastp3o.named_function import FunctionError
from fastp3o.packing.pack import derived_seed
from fastp3o.packing.packed_row import Ids
from fastp3o.rollouts.groups import Group, Prompt, Response, Sampler, Turn
from fastp3o.rollouts.turns.environment import Environments
from fastp3o.rollouts.turns.observation import Observe

# Sets the seeds of further turns apart from those of minibatches and evaluations.
TURNS = 2**32 - 5


@dataclass
class Trajectory:
    """A trajectory that grows. ids: after the prompt, a first observation among them. logprobs: of the policy's tokens;
    None if the sampler gives none.
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
        """What the next turn continues."""
        return self.prompt._replace(ids=self.prompt.ids + self.ids)

    def add_turn(self, response: Response, room: int) -> None:
        """room: tokens that the trajectory may still have. The beginning of a turn is a sample of the policy, too."""
        start, kept = len(self.ids), response.ids[:room]
        self.ids = self.ids + kept
        self.turns.append(Turn(start, len(self.ids)))
        if self.logprobs is not None:
            self.logprobs = None if response.logprobs is None else self.logprobs + array("f", response.logprobs[:room])
        # The half of a command that was cut off is not carried out.
        self.over = not response.finished or len(kept) < len(response.ids)


class TrajectorySampler:
    """A Sampler whose responses are trajectories. first, further: samplers of a turn; further ones have a response to
    each of up to P K contexts. longest: tokens of a trajectory, observations included. end: called after the last turn,
    also after an error.
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
        self.first, self.further, self.continuation = first, further, Continuation(tokenizer)
        self.environments, self.observe, self.max_turns, self.longest = environments, observe, max_turns, longest
        self.end = end

    def __call__(self, prompts: list[Prompt], responses_per_prompt: int, seed: int) -> list[Group]:
        """Raises FunctionError if an environment fails, or begins trajectories of one prompt in different ways."""
        K = responses_per_prompt
        records = [{"prompt": prompt.text, **prompt.columns} for prompt in prompts for _ in range(K)]
        environments, texts = self.environments.begin(records)
        try:
            begun = [
                self.observe(text, prompts[n // K].ids[-1], prompts[n // K].given) if text else []
                for n, text in enumerate(texts)
            ]
            for p in range(len(prompts)):
                if len({*texts[p * K : (p + 1) * K]}) > 1:
                    raise FunctionError(
                        f"{self.environments.name}.reset must begin all trajectories of a prompt alike, since they are "
                        f"compared; it has returned {texts[p * K]!r:.60} and others for one record"
                    )
                if len(begun[p * K]) >= self.longest:
                    limit = f"tokens, and --max_response_tokens is {self.longest}"
                    raise FunctionError(f"{self.environments.name}.reset has returned {len(begun[p * K])} {limit}")
            trajectories = [
                Trajectory(prompts[n // K], prompts[n // K].number * K + n % K, environments[n], begun[n])
                for n in range(len(prompts) * K)
            ]
            self.finish(trajectories, K, seed)
        finally:
            self.end()
            self.environments.close(environments)
        whole = [self.continuation.text(one.ids, one.prompt.ids[-1]) for one in trajectories]
        finished = [
            Response(one.ids, text, one.done, one.logprobs, tuple(one.turns))
            for one, text in zip(trajectories, whole, strict=True)
        ]
        return [Group(prompt, finished[p * K : (p + 1) * K]) for p, prompt in enumerate(prompts)]

    def finish(self, live: list[Trajectory], K: int, seed: int) -> None:
        """Samples all turns, K trajectories of one prompt after the other."""
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

    def take(self, live: list[Trajectory], responses: list[Response]) -> None:
        """Adds a turn to each, and what its environment answers."""
        for trajectory, response in zip(live, responses, strict=True):
            trajectory.add_turn(response, self.longest - len(trajectory.ids))
        answered = [(one, response.text) for one, response in zip(live, responses, strict=True) if not one.over]
        steps = self.environments.step([one.environment for one, _ in answered], [text for _, text in answered])
        for (trajectory, _), step in zip(answered, steps, strict=True):
            trajectory.turns[-1] = trajectory.turns[-1]._replace(rewards=step.rewards, failure=step.failure)
            trajectory.done = step.done and not step.failure
            given = trajectory.prompt.given
            observed = [] if step.done else self.observe(step.observation, trajectory.ids[-1], given)
            # An observation that nothing answers is left out: a trajectory ends with a token of the policy.
            is_last = len(trajectory.turns) == self.max_turns
            trajectory.over = step.done or is_last or len(trajectory.ids) + len(observed) >= self.longest
            if not trajectory.over:
                trajectory.ids = trajectory.ids + observed
