"""Responses from vLLM servers: token ids to them and back, counted and checked."""

from collections.abc import Callable
from itertools import count

from transformers import PreTrainedTokenizerBase

from fastp3o.packing.seeds import derived_seed
from fastp3o.rollouts.groups import POLICY_ITSELF, Ends, Group, Prompt, Response, SamplingSettings
from fastp3o.rollouts.vllm.publisher import Publisher
from fastp3o.rollouts.vllm.servers import Completion, Question, completion_settings
from fastp3o.runtime.processes import on_every_process


class VLLMSampler:
    """A Sampler, called by all processes. The servers have the policy's weights before each call.

    A prompt's responses depend on the seed and the prompt's number, and not on the number of
    servers or processes, as far as the servers' arithmetic does not depend on what else is in a
    batch. publish: brings the policy to the servers. max_response_tokens: longest response.
    """

    def __init__(
        self,
        publish: Publisher,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_response_tokens: int,
        settings: SamplingSettings = POLICY_ITSELF,
    ):
        self.publish, self.servers = publish, publish.servers
        self.ends = Ends(publish.policy.model, tokenizer, settings.stops)
        temperature = publish.policy.temperature
        self.settings = completion_settings(
            settings, temperature, max_response_tokens, self.ends.ids
        )

    def __call__(self, prompts: list[Prompt], responses_per_prompt: int, seed: int) -> list[Group]:
        """Raises EndpointError on all processes if a server refuses or fails, or samples from other
        weights.
        """
        return self.begin(prompts, responses_per_prompt, seed)()

    def begin(
        self, prompts: list[Prompt], responses_per_prompt: int, seed: int
    ) -> Callable[[], list[Group]]:
        """Starts a call, and returns a function that waits for its result. Until then servers keep
        their weights, or interrupt the call.
        """
        self.publish()
        # vLLM adds the number of a response to its prompt's seed.
        seeds = [derived_seed(seed, prompt.number) for prompt in prompts]
        questions = map(Question, count(), [prompt.ids for prompt in prompts], seeds)
        answers = self.servers.complete(
            questions, self.settings | {"n": responses_per_prompt}, self.ends.ids
        )

        def finish() -> list[Group]:
            completions = on_every_process(self.publish.accelerator, lambda: dict(answers))
            return [
                Group(prompt, self.responses(prompt, completions[place]))
                for place, prompt in enumerate(prompts)
            ]

        return finish

    def responses(self, prompt: Prompt, completions: list[Completion]) -> list[Response]:
        ids, logprobs = map(list, zip(*completions, strict=True))
        return list(self.ends.responses(ids, logprobs, prompts=[prompt] * len(ids)))

    def stop(self) -> None:
        """Cancels the calls that were started and have not finished."""
        self.servers.stop()
