"""The options of fine-tuning and of reward modelling, which `--help` explains without importing torch."""

from typing import Literal

from fastp3o.config import SupervisedConfig, option


class SFTConfig(SupervisedConfig):
    """Stage 1: maximum likelihood of the demonstrations."""

    assistant_turns: Literal["last", "all"] = option(
        "last",
        "Assistant turns of a conversation that train. last: the last one. all: every turn, each an example with "
        "what came before it.",
    )
    train_on_prompt: bool = option(
        False,
        "Also train on the prompt's tokens, for models trained from scratch, which must first learn the language.",
    )


class RewardModelConfig(SupervisedConfig):
    """Stage 2: a scalar head trained on comparisons (Bradley-Terry)."""

    centring: float = option(
        0.0,
        "Coefficient of (r_w + r_l)^2, which keeps scores around 0 (arXiv 2312.09244; TRL: 0.01); 0 disables it.",
        at_least=0,
        changeable=True,
    )
