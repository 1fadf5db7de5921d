"""The score of a reward model as a reward."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from fastp3o.models.packed_model import PackedModel, scores
from fastp3o.models.sharding import FrozenModel
from fastp3o.packing.pack import Packing, by_group, pack
from fastp3o.rewards.translation import Translation
from fastp3o.rollouts.rollouts import Rollouts


class ModelReward:
    """Scores of a reward model, whose tokenizer may be another than the policy's.

    device: where it computes. mesh: of processes over which the model is spread; None for one. offload: the model is on
    the CPU between uses.
    """

    def __init__(
        self,
        model: PackedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase,
        *,
        device: torch.device,
        packing: Packing,
        mesh: DeviceMesh | None = None,
        offload: bool = False,
    ):
        self.model = FrozenModel(model, device, mesh, offload=offload)
        self.device, self.packing = device, packing
        self.shares_vocabulary = tokenizer.get_vocab() == policy_tokenizer.get_vocab()
        self.translate = Translation(policy_tokenizer, tokenizer)

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """[P, K] fp32, on the device."""
        prompt_ids, response_ids = rollouts.prompt_ids, rollouts.response_ids
        if not self.shares_vocabulary:
            prompt_ids, response_ids = self.translate(rollouts)
        rows = pack(prompt_ids, response_ids, self.packing)
        rows = [row.to(self.device) for row in rows]
        return by_group(rows, self.model.map_rows(rows, scores))
