"""Judges of the better of two responses, for win rates: a Python function, or a language model at
an endpoint.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from fastp3o.calls.function import call_for_list, import_function
from fastp3o.errors import UserError
from fastp3o.evaluation.config import JudgeConfig
from fastp3o.rewards.comparing_function import read_probability
from fastp3o.rewards.judge import ChatEndpoint, EndpointJudge, read_template
from fastp3o.rewards.verdicts import Verdict, verdict_of

# Called with texts: prompts, first responses, second responses. Returns one verdict for each
# prompt.
Judge = Callable[[Sequence[str], Sequence[str], Sequence[str]], list[Verdict]]


class FunctionJudge:
    """A user's `function(prompts, firsts, seconds)` of lists of texts, given as `module:function`.
    It returns a list of "first", "second", "tie" or "none" (no verdict), one word a comparison; or
    P(the first is better), as rewards that compare do, or None.
    """

    def __init__(self, name: str):
        self.name = name
        self.function = import_function(name, "judge")

    def __call__(
        self, prompts: Sequence[str], firsts: Sequence[str], seconds: Sequence[str]
    ) -> list[Verdict]:
        """Raises ValueError if the function returns another number of verdicts or another word."""
        words = call_for_list(self.function, self.name, list(prompts), list(firsts), list(seconds))
        return [verdict_of(self.probability(*each)) for each in enumerate(words)]

    def probability(self, number: int, answer: object) -> float:
        try:
            return read_probability(answer)
        except ValueError as error:
            raise UserError(f"{self.name}: verdict {number} must be {error}") from error


def load_judge(config: JudgeConfig, verdicts: Path | None) -> Judge | None:
    """The judge that is named, if one is. verdicts: keeps those of an endpoint."""
    if config.judge:
        return FunctionJudge(config.judge)
    if config.judge_url and config.judge_model:
        endpoint = ChatEndpoint(
            config.judge_url,
            config.judge_model,
            timeout=config.judge_timeout,
            retries=config.judge_retries,
        )
        template = read_template(config.judge_template, config.judge_principles)
        return EndpointJudge(
            endpoint, path=verdicts, requests=config.judge_requests, template=template
        )
    return None
