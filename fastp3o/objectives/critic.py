"""PPO's critic: a model of its own, so that learning values does not move the policy."""

import copy

from torch import Tensor, nn

from fastp3o.models.packed_model import PackedModel, scalars
from fastp3o.packing.packed_row import PackedRow


class Critic(nn.Module):
    """A copy of the starting policy, trainable where that is, with a value head in place of its own.

    The value head starts at zero: the first advantages are those of no critic.
    """

    def __init__(self, policy: PackedModel):
        super().__init__()
        self.body = copy.deepcopy(policy)
        language_head = self.body.head().weight
        self.value_head = nn.Linear(language_head.shape[1], 1, bias=False)
        nn.init.zeros_(self.value_head.weight)
        if language_head is not self.body.model.get_input_embeddings().weight:
            # It takes no part.
            self.body.model.get_output_embeddings().requires_grad_(False)

    def forward(self, row: PackedRow) -> Tensor:
        """The value before each scored token, [N] fp32."""
        return self.body(row, row.scored_at, lambda hidden, head: scalars(hidden, self.value_head.weight))
