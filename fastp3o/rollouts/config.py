"""What those who sample without training have in common: win rates, and `stages/generate/`."""

from dataclasses import dataclass

from fastp3o.config import TOKENS_PER_ROW, SamplerConfig, option, required
from fastp3o.data.encoding import LONGEST_TEXT
from fastp3o.packing.pack import Packing
from fastp3o.rollouts.sampling_settings import SamplingSettings


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(SamplerConfig):
    """Responses that nothing is trained on: to which prompts, how many, from what of the distribution."""

    prompts: str = required("Prompts to respond to: a hub name (or name:config), or JSONL or parquet files.")
    trust_remote_code: bool = option(False, "Run model code that comes with a checkpoint. Only for sources you trust.")

    split: str = option("train", "Split of the prompts, for hub data sets and folders that have several.")
    limit: int | None = option(None, "Use only the first this many prompts.")
    skip_bad_records: bool = option(
        False, "Skip and count records that cannot be used. Off: the first one stops the run."
    )
    max_prompt_tokens: int = option(512, "Tokens kept of a prompt; longer ones lose their beginning and are counted.")
    max_characters: int = option(
        LONGEST_TEXT, "Longest prompt, in characters: much longer ones take minutes to tokenise."
    )
    max_response_tokens: int = option(128, "Longest response, in tokens.")
    temperature: float = option(1.0, "Divides the logits; the lower, the more likely the likely tokens.")
    top_k: int = option(0, "Sample from the k most likely tokens only; 0 from all.")
    top_p: float = option(1.0, "Sample from the most likely tokens that together have this probability only.")
    min_p: float = option(0.0, "Sample from tokens with at least this share of the most likely one's probability only.")

    def check_sampling(self) -> None:
        self.check_sampler()
        self.check_at_least(1, "max_prompt_tokens", "max_response_tokens", "max_characters", "limit")
        self.sampling_settings()

    def sampling_settings(self) -> SamplingSettings:
        """Raises ValueError for one out of range."""
        return SamplingSettings(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def longest_sequence(self) -> int:
        """Tokens of a prompt and a response at most."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def packing(self) -> Packing:
        """Of what a reward model scores."""
        return Packing(TOKENS_PER_ROW)
