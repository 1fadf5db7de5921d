"""The flags of what is maximised: rewards and penalties."""

from dataclasses import dataclass, fields
from math import isfinite
from typing import ClassVar

from fastp3o.config import Flags, option, required
from fastp3o.rewards.names import is_endpoint, reward_names

# Fields of the request to an endpoint that are not columns.
TEXTS = ("prompts", "responses")


@dataclass(frozen=True, kw_only=True)
class RemoteConfig(Flags):
    """What goes to rewards behind a URL, and how."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = (
        *("reward_requests", "reward_batch_size", "reward_timeout", "reward_retries"),
    )

    reward_columns: str = option(
        "",
        "Columns of the prompts' data, separated by commas, that go to endpoints, and to functions that take any "
        "(**columns). What functions ask for by name need not stand here.",
    )
    reward_requests: int = option(8, "Concurrent requests of one process to an endpoint.")
    reward_batch_size: int = option(16, "Responses in one request to an endpoint.")
    reward_timeout: float = option(60.0, "Seconds that an endpoint has for one request.")
    reward_retries: int = option(5, "Further attempts where an endpoint is busy, broken or away, after 1, 2, 4, ... s.")

    def check_remote(self, *rewards: str | None) -> None:
        """rewards: their names."""
        columns = self.columns
        self.check(all(columns) and len(set(columns)) == len(columns), "reward_columns", "different names and commas")
        self.check(set(columns).isdisjoint(TEXTS), "reward_columns", f"other names than {' and '.join(TEXTS)}")
        self.check_at_least(1, "reward_requests", "reward_batch_size")
        self.check_at_least(0, "reward_retries")
        self.check(self.reward_timeout > 0, "reward_timeout", "above 0")
        if not any(is_endpoint(name) for name in rewards if name):
            for flag in fields(RemoteConfig):
                if flag.name != "reward_columns" and getattr(self, flag.name) != flag.default:
                    raise ValueError(f"--{flag.name} does nothing without a URL as a reward")

    @property
    def columns(self) -> list[str]:
        return [name.strip() for name in self.reward_columns.split(",")] if self.reward_columns else []


@dataclass(frozen=True, kw_only=True)
class RewardConfig(RemoteConfig):
    """The rewards of sampled responses; README.md of this folder is for users."""

    reward: str = required(
        "What is maximised: a reward model (folder or hub name), a function, as module:function, or the URL of what "
        "scores responses. Of several, separated by commas, the weighted sum is."
    )
    reward_weights: str = option(
        "", "A number for each of the rewards, separated by commas; without them all count alike. 0: only logged."
    )
    gold_reward: str | None = option(
        None, "A second reward, read in evaluations only: what the first one stands for, where that is known."
    )

    def check_rewards(self) -> None:
        names = self.rewards
        self.check(len(names) == 1 or all(names), "reward", "names separated by commas, none of them empty")
        self.check(len(set(names)) == len(names), "reward", "different names")
        try:
            weights = self.weights
        except ValueError:
            weights = []
        usable = len(weights) == len(names) and all(map(isfinite, weights)) and any(weights)
        counted = f"{len(names)} finite number{'s' if len(names) > 1 else ''}"
        self.check(usable, "reward_weights", f"{counted}, as many as there are rewards, and not all 0")
        self.check_remote(*names, self.gold_reward)

    @property
    def rewards(self) -> list[str]:
        return reward_names(self.reward)

    @property
    def weights(self) -> list[float]:
        """One a reward. Raises ValueError where something is no number."""
        return (
            [float(part) for part in self.reward_weights.split(",")]
            if self.reward_weights
            else [1.0] * len(self.rewards)
        )


@dataclass(frozen=True, kw_only=True)
class PenaltyConfig(Flags):
    """Penalties on responses; 0 is none."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = (
        *("missing_eos_penalty", "length_penalty", "length_penalty_after", "repetition_penalty", "repetition_ngram"),
        "overlong_margin",
    )

    missing_eos_penalty: float = option(0.0, "Subtracted from the reward of a response without an end-of-sequence.")
    length_penalty: float = option(0.0, "Subtracted for each token of a response beyond --length_penalty_after.")
    length_penalty_after: int = option(0, "Tokens of a response that --length_penalty leaves free.")
    repetition_penalty: float = option(
        0.0, "Subtracted times the share of a response's n-grams of tokens that were there before in it."
    )
    repetition_ngram: int = option(3, "n of the n-grams that --repetition_penalty counts, in tokens.")
    overlong_margin: int = option(
        0,
        "DAPO's overlong shaping: what is subtracted rises from 0 to 1 over so many last tokens before "
        "--max_response_tokens.",
    )

    def check_penalties(self, longest: int) -> None:
        """longest: tokens that a response may have."""
        self.check_at_least(
            0, "missing_eos_penalty", "length_penalty", "length_penalty_after", "repetition_penalty", "overlong_margin"
        )
        self.check_at_least(1, "repetition_ngram")
        self.check_alone("length_penalty", "length_penalty_after")
        self.check_alone("repetition_penalty", "repetition_ngram")
        self.check(
            self.length_penalty_after < longest, "length_penalty_after", f"below --max_response_tokens ({longest})"
        )
        self.check(self.overlong_margin <= longest, "overlong_margin", f"at most --max_response_tokens ({longest})")
