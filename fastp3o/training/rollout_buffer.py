"""Rollouts of each update, begun some updates before they train."""

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor

from fastp3o.calls.endpoint import EndpointError
from fastp3o.calls.function import FunctionError
from fastp3o.config import SamplerConfig
from fastp3o.data.tokens import Continuation
from fastp3o.objectives.config.base import UpdatesConfig
from fastp3o.packing.seeds import derived_seed, examples_of_step
from fastp3o.packing.shares import process_share
from fastp3o.rewards.scaling import tied
from fastp3o.rollouts.groups import Group, Prompt, Response, Sampler, Turn, lengths, make_prompts
from fastp3o.rollouts.turns.served import ServedTrajectories
from fastp3o.rollouts.vllm.sampler import VLLMSampler
from fastp3o.rollouts.vllm.servers import OtherWeightsError
from fastp3o.runtime.context import Context
from fastp3o.training.batch import RolloutBatch

# Samplers whose responses come from servers.
SERVED = VLLMSampler | ServedTrajectories
# Tokens are rounded independently, so a response's log-prob differs by about the square root of its
# length times what a token's does. The margin is for tokens that differ by more than the mean.
MARGIN = 5.0
# Sets seeds of responses that are sampled again apart from those of the order of minibatches.
AGAIN = 2**32 - 3


# --- one update's rollouts ------------------------------------------------------------------------


class BufferedRollouts:
    """An update's rollouts. sampled_at: the update before whose steps it was sampled. finish: waits
    for the groups.
    """

    def __init__(self, sampled_at: int, finish: Callable[[], list[Group]]):
        self.sampled_at, self.finish = sampled_at, finish
        self.groups: list[Group] | None = None
        self.error: EndpointError | FunctionError | None = None

    def wait(self) -> list[Group]:
        """Raises EndpointError or FunctionError if servers or environments have failed, each time
        that it is asked.
        """
        if self.error is not None:
            raise self.error
        if self.groups is None:
            try:
                self.groups = self.finish()
            except (EndpointError, FunctionError) as error:
                self.error = error
                raise
        return self.groups


# --- the rollouts of all updates ------------------------------------------------------------------


class RolloutBuffer:
    """Gives each update its rollouts.

    Those of update t + N (`rounds_ahead`) come from the policy as it is before update t's steps.
    Servers sample them while t trains; a sampler of this process samples them first.

    updates: how many there are, and of how many rollouts. sampling: the options that `sampler`
    follows. examples: the prompts of all updates. seed: the run's.
    """

    def __init__(
        self,
        context: Context,
        updates: UpdatesConfig,
        sampling: SamplerConfig,
        sampler: Sampler,
        examples: Dataset,
        *,
        seed: int,
    ):
        self.context, self.updates, self.sampling = context, updates, sampling
        self.sampler, self.examples, self.seed = sampler, examples, seed
        self.buffered: dict[int, BufferedRollouts] = {}

    def __call__(self, update: int) -> list[Group]:
        """This process's rollouts of an update. Raises EndpointError if servers fail."""
        self.buffered = {
            number: sampled for number, sampled in self.buffered.items() if number >= update
        }
        last = min(update + self.updates.rounds_ahead, self.updates.updates)
        for number in range(update, last + 1):
            if number not in self.buffered:
                try:
                    self.buffered[number] = BufferedRollouts(update, self.begin(number))
                except OtherWeightsError as error:  # of the rounds that were sampled last
                    for earlier in self.buffered.values():
                        earlier.error = error
                    raise
        return self.buffered[update].wait()

    def prompts(self, update: int, numbers: list[int] | None = None) -> list[Prompt]:
        """This process's prompts of an update, or those with other numbers within the update."""
        size, total = self.updates.prompts_per_update, len(self.examples)
        chosen = examples_of_step(update - 1, batch_size=size, total=total, seed=self.seed)
        if numbers is None:
            numbers = process_share(list(range(size)), self.context.accelerator)
        return make_prompts(self.examples[[chosen[number] for number in numbers]], numbers)

    def resampled(
        self,
        update: int,
        batch: RolloutBatch,
        score: Callable[[list[Group]], RolloutBatch],
        *,
        takes_pairs: bool = False,
    ) -> RolloutBatch:
        """Dynamic sampling (DAPO, arXiv 2503.14476): a group of equal rewards teaches nothing, so
        it is sampled again, until it has others, at most `dynamic_sampling` times. Returns another
        batch. score: gathers rewards of groups that this process has sampled. takes_pairs: whether
        the loss reads the differences of pairs where there are some. Preferences in a circle have
        equal row means, and teach a loss that reads the pairs.
        """
        accelerator, updates, count = self.context.accelerator, self.updates, 0
        groups = list(batch.groups)
        rewards = {name: table.clone() for name, table in batch.rewards.items()}
        token_rewards = None if batch.token_rewards is None else batch.token_rewards.clone()
        pair_rewards = None if batch.pair_rewards is None else batch.pair_rewards.clone()
        for attempt in range(1, updates.dynamic_sampling + 1):
            if takes_pairs and pair_rewards is not None:
                teaches_nothing = ~pair_rewards.any(dim=2).any(dim=1)
            else:
                teaches_nothing = tied(rewards["reward"])
            again = teaches_nothing.nonzero().flatten().tolist()
            if not again:
                break
            count += len(again)
            # Processes wait for one another in passes, so one that has no prompt left samples
            # another's.
            prompts = self.prompts(update, process_share(again, accelerator) or again[:1])
            seed = derived_seed(self.seed, update, AGAIN, attempt)
            fresh = score(self.sampler(prompts, updates.responses_per_prompt, seed))
            for place, group in enumerate(fresh.groups):
                number = group.prompt.number
                groups[number] = group
                for name, table in rewards.items():
                    table[number] = fresh.rewards[name][place]
                if token_rewards is not None and fresh.token_rewards is not None:
                    token_rewards[number] = fresh.token_rewards[place]
                if pair_rewards is not None and fresh.pair_rewards is not None:
                    pair_rewards[number] = fresh.pair_rewards[place]
        return RolloutBatch(groups, rewards, token_rewards, pair_rewards, sampled_again=count)

    def begin(self, number: int) -> Callable[[], list[Group]]:
        prompts, seed = self.prompts(number), derived_seed(self.seed, number)
        if isinstance(self.sampler, SERVED) and self.updates.rounds_ahead:
            return self.sampler.begin(prompts, self.updates.responses_per_prompt, seed)
        groups = self.sampler(prompts, self.updates.responses_per_prompt, seed)
        return lambda: groups

    def staleness(self, update: int) -> int:
        """Updates between the policy that (first) sampled an update's rollouts, and the one that
        they train.
        """
        return update - self.buffered[update].sampled_at

    def metrics(self, update: int) -> dict[str, float]:
        """How stale rollouts are, if rounds are sampled ahead; how servers round (`probe_gap`, nats
        a token).
        """
        if not self.updates.rounds_ahead:
            return {}
        metrics: dict[str, float] = {"staleness": self.staleness(update)}
        # A resumed run whose last rounds were sampled before asks its servers nothing.
        if isinstance(self.sampler, SERVED) and self.sampler.publish.gap is not None:
            metrics["probe_gap"] = self.sampler.publish.gap
        return metrics

    def require_same_policy(
        self, update: int, groups: Sequence[Group], gaps: dict[str, Tensor]
    ) -> None:
        """Raises OtherWeightsError on every process if servers sampled an update's rollouts from
        other weights than the policy's. `sampler_gap` cannot tell with stale or truncated rollouts;
        then the publisher has compared the two.
        """
        if (
            not isinstance(self.sampler, SERVED)
            or self.staleness(update)
            or self.sampling.truncates
        ):
            return
        gap = self.context.accelerator.reduce(gaps["sampler_gap"], reduction="mean").item()
        # A temperature below 1 multiplies what logits are off.
        tolerance = self.sampler.publish.tolerance / min(1.0, self.sampling.temperature)
        bound = MARGIN * tolerance * lengths(groups).mean().sqrt().item()
        if not gap <= bound:
            raise OtherWeightsError(
                f"the servers' log-probs of responses are {gap:.3g} nats off the policy's own (sampler_gap), more than "
                f"{bound:.3g}: they did not sample from its weights, though they answered that they had loaded them"
            )

    def close(self) -> None:
        """Gives up what servers still sample."""
        if isinstance(self.sampler, SERVED):
            self.sampler.stop()

    def saved(self, step: int) -> dict[str, Any]:
        """All processes' rollouts of updates after `step` from a policy that is gone by then, as
        JSON. Waits for them. Those that servers or environments have failed to answer are left out:
        a resumed run samples them again.
        """
        saved = {}
        for number, sampled in sorted(self.buffered.items()):
            if number <= step or sampled.sampled_at > step:
                continue
            try:
                groups = sampled.wait()
            except (EndpointError, FunctionError):
                continue
            answers = {
                str(prompt.number): [
                    [r.ids, list(r.logprobs or []), r.finished, r.turns] for r in responses
                ]
                for prompt, responses in groups
            }
            everyone = (
                gather_object([answers])
                if self.context.accelerator.num_processes > 1
                else [answers]
            )
            saved[str(number)] = {
                "sampled_at": sampled.sampled_at,
                "responses": {
                    prompt: responses for part in everyone for prompt, responses in part.items()
                },
            }
        return saved

    def restore(self, saved: dict[str, Any]) -> None:
        """Continues from what `saved` has returned, on any number of processes."""
        continuation = Continuation(self.context.tokenizer)
        for number, content in saved.items():
            groups = []
            for prompt in self.prompts(int(number)):
                ids, logprobs, finished, turns = map(
                    list, zip(*content["responses"][str(prompt.number)], strict=True)
                )
                texts = [continuation.text(part, prompt.ids[-1]) for part in ids]
                computed = [array("f", values) if all(logprobs) else None for values in logprobs]
                all_turns = [tuple(Turn(*turn) for turn in part) for part in turns]
                groups.append(
                    Group(prompt, list(map(Response, ids, texts, finished, computed, all_turns)))
                )
            self.buffered[int(number)] = BufferedRollouts(
                content["sampled_at"], partial(list, groups)
            )
