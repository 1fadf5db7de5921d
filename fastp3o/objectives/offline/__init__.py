"""Objectives that learn from fixed preferences: one file each, its settings and its loss. README.md one folder up.

config.py   what all have in common
pairs.py    what those of a chosen and a rejected response have in common
"""

from collections.abc import Mapping

from fastp3o.objectives.offline.apo import APODownConfig, APOZeroConfig
from fastp3o.objectives.offline.config import PreferenceConfig
from fastp3o.objectives.offline.cpo import CPOConfig
from fastp3o.objectives.offline.discopop import DiscoPOPConfig
from fastp3o.objectives.offline.dpo import DPOConfig
from fastp3o.objectives.offline.ipo import IPOConfig
from fastp3o.objectives.offline.kto import KTOConfig
from fastp3o.objectives.offline.orpo import ORPOConfig
from fastp3o.objectives.offline.simpo import SimPOConfig
from fastp3o.objectives.offline.slic import SLiCConfig

# By what `--objective` says.
OFFLINE_OBJECTIVES: Mapping[str, type[PreferenceConfig]] = {
    "dpo": DPOConfig,
    "ipo": IPOConfig,
    "simpo": SimPOConfig,
    "orpo": ORPOConfig,
    "cpo": CPOConfig,
    "slic": SLiCConfig,
    "apo_zero": APOZeroConfig,
    "apo_down": APODownConfig,
    "discopop": DiscoPOPConfig,
    "kto": KTOConfig,
}
