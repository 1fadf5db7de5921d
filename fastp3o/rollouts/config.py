"""The flags that win rates and `generate/` share: sampling without training."""

from typing import Any

from fastp3o.config import TOKENS_PER_ROW, PolicyConfig, options, required
from fastp3o.packing.settings import Packing


@options
class SamplingConfig(PolicyConfig):
    """The prompts that are responded to."""

    prompts: str = required("Prompts to respond to: a hub name (or name:config), or JSONL or parquet files.")

    @property
    def prompt_options(self) -> dict[str, Any]:
        """Options of `load_prompts`."""
        return {
            "split": self.split,
            "limit": self.limit,
            "max_prompt_tokens": self.max_prompt_tokens,
            "max_characters": self.max_characters,
            "skip_bad_records": self.skip_bad_records,
        }

    @property
    def packing(self) -> Packing:
        """How a reward model's rows are packed."""
        return Packing(TOKENS_PER_ROW)
