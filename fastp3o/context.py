"""The processes, precision and tokenizer of a run, made once, and what its caller gives."""

from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from fastp3o.given import NOTHING, Given
from fastp3o.precision import Precision


class Context(NamedTuple):
    """The processes, their arithmetic, and the policy's tokenizer. mesh: None for a single process. given: in the place
    of names.
    """

    accelerator: Accelerator
    precision: Precision
    tokenizer: PreTrainedTokenizerBase
    mesh: DeviceMesh | None
    given: Given = NOTHING

    @property
    def device(self) -> torch.device:
        return self.accelerator.device
