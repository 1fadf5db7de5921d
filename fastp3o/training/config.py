"""The options of fine-tuning and of reward modeling, which `--help` explains without importing
torch.
"""

from typing import Literal

from fastp3o.config import SupervisedConfig, option
from fastp3o.errors import UserError


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
    """Stage 2: a scalar head trained on comparisons (Bradley-Terry), or a head of vectors (a
    preference model).
    """

    preference_dim: int = option(
        0,
        "Numbers in each response's vector v of a preference model, whose preferences may go in circles (arXiv "
        "2410.02197): P(y > y') = sigmoid(v R v'), R skew-symmetric. Even; 2 hold a circle. 0 trains a reward model.",
        at_least=0,
    )
    centring: float = option(
        0.0,
        "Coefficient of (r_w + r_l)^2, which keeps scores around 0 (arXiv 2312.09244; TRL: 0.01); 0 disables it.",
        at_least=0,
        changeable=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preference_dim % 2:
            raise UserError(
                f"--preference_dim must be even: vectors are made of blocks of 2, got {self.preference_dim}"
            )
        if self.preference_dim and self.centring:
            raise UserError(
                "--centring keeps scores around 0, and with --preference_dim responses have none: leave it out"
            )
        if self.preference_dim and self.lora_rank and self.lora_save == "adapter":
            lacking = "an adapter alone has no configuration that says what its head gives"
            raise UserError(
                f"--lora_save adapter cannot save a preference model: {lacking}; use --lora_save merged"
            )
