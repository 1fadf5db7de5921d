"""The flags that win rates and `stages/generate/` share: sampling without training."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastp3o.config import LONGEST_TEXT, TOKENS_PER_ROW, SamplerConfig, option, required
from fastp3o.packing.settings import Packing

if TYPE_CHECKING:
    from fastp3o.data.loading import Options


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(SamplerConfig):
    """The prompts that are responded to."""

    prompts: str = required("Prompts to respond to: a hub name (or name:config), or JSONL or parquet files.")
    trust_remote_code: bool = option(
        False, "Run model code that comes with a checkpoint. Only for sources you trust.", changeable=True
    )

    split: str = option("train", "Split of the prompts, for hub data sets and folders that have several.")
    limit: int | None = option(None, "Use only this many prompts, the first.", at_least=1)
    skip_bad_records: bool = option(
        False, "Skip and count records that cannot be used. Off: the first one stops the run."
    )
    max_prompt_tokens: int = option(
        512, "Tokens kept of a prompt; longer ones lose their beginning and are counted.", at_least=1
    )
    max_characters: int = option(
        LONGEST_TEXT, "Longest prompt, in characters: much longer ones take minutes to tokenise.", at_least=1
    )
    max_response_tokens: int = option(128, "Longest response, in tokens.", at_least=1)

    @property
    def prompt_options(self) -> "Options":
        """Options of `load_prompts`."""
        return {
            "split": self.split,
            "limit": self.limit,
            "max_prompt_tokens": self.max_prompt_tokens,
            "max_characters": self.max_characters,
            "skip_bad_records": self.skip_bad_records,
        }

    @property
    def longest_sequence(self) -> int:
        """Tokens of a prompt and a response at most."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def packing(self) -> Packing:
        """How a reward model's rows are packed."""
        return Packing(TOKENS_PER_ROW)
