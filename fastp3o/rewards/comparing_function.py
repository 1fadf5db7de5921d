"""A user's Python function of pairs of texts, which says which response is better, as a relative
reward.
"""

from collections.abc import Callable
from functools import partial
from math import isnan, nan
from typing import Any

from fastp3o.calls.function import FunctionError, call_for_list, import_function
from fastp3o.errors import UserError
from fastp3o.rewards.comparisons import Comparison, JudgedPairs
from fastp3o.rewards.function import FunctionReward, UserFunction, signature_of
from fastp3o.rollouts.groups import Prompt, Response

PAIR = ("prompts", "firsts", "seconds")
# What functions of verdicts return, as judges of win rates do.
WORDS = {"first": 1.0, "second": 0.0, "tie": 0.5, "none": nan}


class ComparingFunction(UserFunction, JudgedPairs):
    """`better(prompts: list[str], firsts: list[str], seconds: list[str], ...) -> list[float]`,
    P(the first response is better) of each pair: any number from 0 to 1, one of WORDS, or None for
    no verdict. Its parameters' names say that it compares. Further parameters are those of every
    UserFunction.

    Each pair is asked about once, in one order. A function that prefers one place should ask itself
    in both.
    """

    def __init__(self, name: str, timeout: float | None, function: Callable):
        """Raises UserError if it does not take prompts, firsts and seconds first."""
        signature = signature_of(function)
        if tuple(signature.parameters)[: len(PAIR)] != PAIR:
            raise UserError(
                f"the comparing function {name} must take {', '.join(PAIR)} first, in this order, and columns of the "
                f"data after them, by name; it takes {signature}"
            )
        super().__init__(name, timeout, function, PAIR)

    def check(self, prompt: Prompt, siblings: int = 2) -> None:
        """Asks about two responses to a prompt, the words "response" and "other". Raises as a call
        does.
        """
        first, second = (Response(prompt.ids[-1:], text, True) for text in ("response", "other"))
        self.ask([Comparison(prompt, first, second, (0, 1))])
        self.logged.clear()

    def ask(self, comparisons: list[Comparison]) -> list[float]:
        """Raises FunctionError if the function fails, or does not return a probability for each
        pair.
        """
        if not comparisons:
            return []
        prompts, firsts, seconds, _ = map(list, zip(*comparisons, strict=True))
        texts = (
            [prompt.text for prompt in prompts],
            [one.text for one in firsts],
            [one.text for one in seconds],
        )
        function = partial(self.function, **self.by_name(prompts))
        answers = call_for_list(function, self.name, *texts, timeout=self.timeout)
        return [self.probability(*each) for each in zip(answers, comparisons, strict=True)]

    def probability(self, answer: Any, comparison: Comparison) -> float:
        """An answer as a number. Raises FunctionError, with the pair, for what is none."""
        try:
            return read_probability(answer)
        except ValueError as error:
            raise FunctionError(
                f"{self.name} must return P(the first response is better), {error} for {comparison}"
            ) from error


def read_probability(answer: Any) -> float:
    """P(the first response is better) that a function has returned; NaN for no verdict. Raises
    ValueError, which says what was expected and what came.
    """
    if answer is None:
        return nan
    if isinstance(answer, str) and answer in WORDS:
        return WORDS[answer]
    try:
        value = nan if isinstance(answer, str) else float(answer)
    except BaseException:  # of an entry's own __float__
        value = nan
    if isnan(value) or not 0 <= value <= 1:
        raise ValueError(
            f"a number from 0 to 1, one of {', '.join(WORDS)}, or None, got {answer!r:.80}"
        )
    return value


def load_function(
    name: str, timeout: float | None = None, function: Callable | None = None
) -> FunctionReward | ComparingFunction:
    """A function of rewards, or one that compares, as the names of its parameters say. function:
    itself, instead of importing the name. Raises UserError if there is no such function, or it
    takes something else.
    """
    function = import_function(name, "reward function") if function is None else function
    compares = {*PAIR[1:]} <= signature_of(function).parameters.keys()
    return (ComparingFunction if compares else FunctionReward)(name, timeout, function)
