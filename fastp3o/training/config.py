"""The options of fine-tuning and of reward modelling, which `--help` explains without importing torch."""

from typing import Literal

from fastp3o.config import SupervisedConfig, option


class SFTConfig(SupervisedConfig):
    """Stage 1: maximum likelihood of the demonstrations."""

    assistant_turns: Literal["last", "all"] = option(
        "last", "Turns of a chat's assistant that train: the last, or all, each with what came before it."
    )
    train_on_prompt: bool = option(False, "Also learn the prompts' tokens, for models trained from scratch.")


class RewardModelConfig(SupervisedConfig):
    """Stage 2: a scalar head trained on comparisons (Bradley-Terry)."""

    centring: float = option(
        0.0, "Coefficient of (r_w + r_l)^2 (arXiv 2312.09244; TRL: 0.01).", at_least=0, changeable=True
    )
