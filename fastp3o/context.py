"""The processes, precision and tokenizer of a run, made once."""

from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from fastp3o.precision import Precision


class Context(NamedTuple):
    """The processes, their arithmetic, and the policy's tokenizer. mesh: None for a single process."""

    accelerator: Accelerator
    precision: Precision
    tokenizer: PreTrainedTokenizerBase
    mesh: DeviceMesh | None

    @property
    def device(self) -> torch.device:
        return self.accelerator.device
