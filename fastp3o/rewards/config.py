"""The flags of rewards and penalties."""

import os
import re
from collections.abc import Sequence
from math import isfinite
from typing import Literal

from fastp3o.calls.function import colon_form
from fastp3o.config import Condition, Flags, Needs, Rule, option, required
from fastp3o.errors import UserError
from fastp3o.sources import InMemory, Source

ENVIRONMENT = "environment"  # the reward that the environment gives
VERDICTS = "verdicts.jsonl"  # in a run's folder; of further processes verdicts-1.jsonl, ...
JUDGE = "judge"  # the reward by which a language model compares responses
# Which of a prompt's responses a reward compares.
Compared = Literal["all", "circular", "anchor"]
# Fields of the request to an endpoint that are not columns.
TEXTS = ("prompts", "responses")
# The limits without --reward_timeout: a call of a function may ask a service for all responses of a
# process.
REQUEST_SECONDS, CALL_SECONDS = 60.0, 1800.0

URL = Condition(
    "reward", "a URL as a reward", lambda config: any(map(is_endpoint, config.single_scorers))
)
URL_OR_FUNCTION = Condition(
    "reward",
    "a URL or a function as a reward",
    lambda config: any(is_endpoint(name) or is_function(name) for name in config.single_scorers),
)


# Of configurations with rewards and an environment.
ENVIRONMENT_RULES = (
    Rule(
        ("reward_columns", "environment"),
        lambda config: ENVIRONMENT in config.single_scorers and not config.environment,
        "--reward environment needs an --environment that gives it; --tools give none",
    ),
)


# --- options --------------------------------------------------------------------------------------


class RemoteConfig(Flags):
    """Requests to rewards that are URLs."""

    section = "rewards"
    reward_columns: str | Sequence[str] = option(
        "",
        "Data columns to send to reward endpoints, and to functions that accept **columns, comma-separated.",
        needs="reward",
        python=list,
    )
    reward_requests: int = option(
        8,
        "Maximum number of concurrent requests to an endpoint, per process.",
        at_least=1,
        needs=URL,
        changeable=True,
    )
    reward_batch_size: int = option(
        16,
        "Responses in one request to an endpoint. All responses to a prompt go together: as many prompts as fit, at "
        "least one.",
        at_least=1,
        needs=URL,
        changeable=True,
    )
    reward_timeout: float | None = option(
        None,
        "Seconds that an endpoint may take to answer a request (default: 60), or a function for one call (default: "
        "1800).",
        above=0,
        needs=URL_OR_FUNCTION,
        changeable=True,
    )
    reward_retries: int = option(
        5,
        "Further attempts after an endpoint failed, after 1, 2, 4, ... seconds; 0 disables retries.",
        at_least=0,
        needs=URL,
        changeable=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        columns = self.columns
        if not all(columns) or len(set(columns)) < len(columns):
            raise UserError(
                f"--reward_columns must be different names, comma-separated, got {self.reward_columns!r}"
            )
        if not set(columns).isdisjoint(TEXTS):
            raise UserError(
                f"--reward_columns must be other than {' and '.join(TEXTS)}, got {self.reward_columns!r}"
            )

    def check_complete(self) -> None:
        super().check_complete()
        for name in self.single_scorers:
            require_no_module(name)

    @property
    def call_seconds(self) -> float:
        return self.reward_timeout or CALL_SECONDS

    @property
    def scorers(self) -> list[Source]:
        """The names of all rewards."""
        return []

    @property
    def single_scorers(self) -> list[Source]:
        """The same, with those of a cascade one by one."""
        return [single for name in self.scorers for single in cascaded(name)]

    @property
    def columns(self) -> list[str]:
        return (
            [name.strip() for name in str(self.reward_columns).split(",")]
            if self.reward_columns
            else []
        )


def judge_rewards(flag: str) -> Condition:
    """That a reward asks a judge. flag: of the configurations to which the condition belongs."""
    return Condition(
        flag, "--reward judge", lambda config: any(map(is_judge, config.single_scorers))
    )


ASKS_JUDGE: Needs = ("keep=judged", judge_rewards("keep"), judge_rewards("gold_reward"))


class LanguageJudgeConfig(RemoteConfig):
    """A language model that is asked which of two responses is better."""

    section = "judge"
    judge_url: str | None = option(
        None,
        "URL of an OpenAI-compatible endpoint whose model judges. The environment variable OPENAI_API_KEY holds its "
        "key, if any.",
        needs=ASKS_JUDGE,
        changeable=True,
    )
    judge_model: str | None = option(
        None,
        "Name of the model at --judge_url; for --reward judge without a URL a causal LM, as a folder or hub name, that "
        "is asked on this machine.",
        needs=("judge_url", judge_rewards("reward")),
        changeable=True,
    )
    judge_principles: str | None = option(
        None,
        "File of the principles by which the model judges, one a line. Default: it judges how well a response does "
        "what the prompt asks for.",
        needs="judge_model",
    )
    judge_template: str | None = option(
        None,
        "File with the question to the model, with $prompt, $first, $second and, for principles, $criteria. Default: "
        "the one in rewards/judge.py.",
        needs="judge_model",
    )
    judge_requests: int = option(
        8,
        "Maximum number of concurrent requests to --judge_url.",
        at_least=1,
        needs="judge_url",
        changeable=True,
    )
    judge_timeout: float = option(
        120.0,
        "Seconds that --judge_url may take to answer a request.",
        above=0,
        needs="judge_url",
        changeable=True,
    )
    judge_retries: int = option(
        6,
        "Further attempts after --judge_url failed, after 1, 2, 4, ... seconds: 6 wait a minute or more in all, 8 four "
        "minutes or more. 0 disables retries.",
        at_least=0,
        needs="judge_url",
        changeable=True,
    )
    verdicts: str | None = option(
        None,
        "JSONL file where verdicts of --judge_url are kept, so that they are not asked for again. Default for --reward "
        "judge: verdicts.jsonl in the run's folder.",
        needs="judge_url",
        changeable=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.judge_url and not self.judge_model:
            raise UserError("--judge_url has no effect without --judge_model")

    def check_complete(self) -> None:
        super().check_complete()
        if any(map(is_judge, self.single_scorers)) and not self.judge_model:
            raise UserError(
                "--reward judge asks a language model: give --judge_model, and --judge_url if it is served"
            )


class RewardConfig(RemoteConfig):
    """The rewards of sampled responses; README.md of this folder is for users."""

    section = "rewards"
    reward: str | InMemory = required(
        "Reward to maximize: a reward model (folder or hub name), a function, as module:function, or a URL; "
        "comma-separated names for the weighted sum of several. In `A else B`, B rewards the responses for which A "
        "returns None.",
        python=list,
    )
    reward_weights: str | Sequence[float] = option(
        "",
        "Weight of each reward, comma-separated; a reward with weight 0 is only logged. Default: 1 each.",
        needs="reward",
        python=list,
    )
    gold_reward: str | InMemory | None = option(
        None,
        "Second reward, computed only in evaluations: the true one that --reward stands for, if you have it.",
        needs="eval_prompts",
    )
    rival: str | None = option(
        None,
        "Model whose responses to --eval_prompts evaluations compare the policy's with, for win_rate. Default: the "
        "starting model where a reward compares responses; else no win_rate. A rival of another vocabulary reads "
        "prompts in its own tokens and by its own chat template; limits count those then.",
        needs="eval_prompts",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.rewards
        if len(names) > 1 and not all(names):
            raise UserError(
                f"--reward must be comma-separated names, none of them empty, got {self.reward!r}"
            )
        if len(set(map(str, names))) < len(names):
            raise UserError(f"--reward must be different names, got {self.reward!r}")
        try:
            weights = self.weights
        except ValueError:
            weights = []
        if names and not (
            len(weights) == len(names) and all(map(isfinite, weights)) and any(weights)
        ):
            raise UserError(
                f"--reward_weights must be {len(names)} finite number{'s' if len(names) > 1 else ''}, as many as there "
                f"are rewards, and not all 0, got {self.reward_weights!r}"
            )

    @property
    def scorers(self) -> list[Source]:
        return [*self.rewards, *([self.gold_reward] if self.gold_reward else [])]

    @property
    def rewards(self) -> list[Source]:
        return reward_names(self.reward)

    @property
    def weights(self) -> list[float]:
        """The weight of each reward. Raises ValueError for text that is no number."""
        return (
            [float(part) for part in str(self.reward_weights).split(",")]
            if self.reward_weights
            else [1.0] * len(self.rewards)
        )


class ComparisonConfig(Flags):
    """Rewards that compare the responses to a prompt, in place of scoring each."""

    section = "rewards"
    comparisons: Compared = option(
        "all",
        "Pairs that a reward which compares responses judges, of K responses to a prompt. all: every pair, K (K − 1) / "
        "2. circular: each response with the next, K. anchor: each with one response of the reference (in `generate`, "
        "one more response of the model), K. Needs a reward that judges pair by pair: a function or judge, no "
        "preference model.",
    )


class PenaltyConfig(Flags):
    """Penalties on responses, in the reward's unit; 0 for none."""

    section = "rewards"
    missing_eos_penalty: float = option(
        0.0,
        "Penalty for a response without an end-of-sequence, in the reward's unit; 0 disables it.",
        at_least=0,
        changeable=True,
    )
    length_penalty: float = option(
        0.0,
        "Penalty for each token of a response beyond --length_penalty_after, in the reward's unit; 0 disables it.",
        at_least=0,
        changeable=True,
    )
    length_penalty_after: int = option(
        0,
        "Number of tokens of a response that --length_penalty leaves free.",
        at_least=0,
        needs="length_penalty",
        changeable=True,
    )
    ngram_penalty: float = option(
        0.0,
        "Penalty coefficient, in the reward's unit: multiplied by the fraction of a response's n-grams that repeat "
        "earlier ones; 0 disables it.",
        at_least=0,
        changeable=True,
    )
    ngram_length: int = option(
        3,
        "Length n of the n-grams that --ngram_penalty counts, in tokens.",
        at_least=1,
        needs="ngram_penalty",
        changeable=True,
    )
    overlong_margin: int = option(
        0,
        "DAPO's overlong shaping: the penalty rises from 0 to 1 over the last this many allowed tokens; 0 disables it.",
        at_least=0,
        changeable=True,
    )


# --- names of rewards -----------------------------------------------------------------------------


def reward_names(names: Source) -> list[Source]:
    """Splits the names of several rewards, separated by commas; the name of a path that exists may
    hold commas.
    """
    if not names:
        return []
    if isinstance(names, InMemory):
        return names.value if isinstance(names.value, list) else [names]
    return [names] if os.path.exists(names) else [name.strip() for name in names.split(",")]


def cascaded(name: Source) -> list[Source]:
    """The rewards of a cascade, `A else B`, or the only one."""
    if isinstance(name, InMemory):
        return [*name.value] if type(name.value) is tuple else [name]
    return [name] if os.path.exists(name) else [part.strip() for part in name.split(" else ")]


def short_names(names: Sequence[Source]) -> list[str]:
    """Names in metrics: the last part of a path, a URL or module:function; the whole where several
    have the same.
    """
    last = [
        " else ".join(re.split("[/:]", str(part).rstrip("/"))[-1] for part in cascaded(name))
        for name in names
    ]
    return [
        short if short and last.count(short) == 1 else str(name)
        for short, name in zip(last, names, strict=True)
    ]


def is_endpoint(name: Source) -> bool:
    return str(name).lower().startswith(("http://", "https://"))


def is_judge(name: object) -> bool:
    """Whether it stands for --judge_model; a model may be in a folder of that name."""
    return name == JUDGE and not os.path.exists(JUDGE)


def require_no_module(name: Source) -> None:
    """Raises UserError for what looks like Python in place of a reward model: its file, or a
    function with a dot, as TRL has it. The hub would be asked for a minute.
    """
    if not isinstance(name, str) or name in (ENVIRONMENT, JUDGE) or os.path.isdir(name):
        return
    file = f"{name.removesuffix('.py')}.py"
    if os.path.isfile(file):
        raise UserError(
            f"the reward {name} is neither a folder nor a function; of {file} it is {name}:FUNCTION"
        )
    if function := colon_form(name):
        raise UserError(f"the reward {name} is no folder; a function is {function}")


def is_function(name: Source) -> bool:
    """Whether it names a Python function, as module:function, and not a model."""
    return ":" in str(name) and not is_endpoint(name) and not os.path.exists(str(name))
