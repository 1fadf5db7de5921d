"""Settings of packing, apart from it because configurations have them before torch is imported."""

from typing import NamedTuple


class Packing(NamedTuple):
    """Settings of packing. tokens_per_row: tokens of one packed row, that is of one forward pass.
    share_prompts: the prompt of several responses is in the row once.
    """

    tokens_per_row: int
    share_prompts: bool = True
