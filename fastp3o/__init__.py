"""fastp3o: a trainer for Pairwise Proximal Policy Optimization (P3O, arXiv 2310.00212).

`train` does from Python what the scripts do (training/api.py). Names are imported when they are first used: torch alone
takes seconds. __init__.pyi has their types.
"""

import importlib
from typing import Any

# That of fastp3o_kernels, whose import takes torch's seconds; a test compares them.
__version__ = "0.1.0"

HOMES = {
    "errors": ("UserError",),
    "run.result": ("Result",),
    "training.api": ("train",),
    "training.config": ("RewardModelConfig", "SFTConfig"),
    "objectives.config.distillation": ("DistillationConfig",),
    "objectives.config.p3o": ("P3OConfig", "PPGConfig"),
    "objectives.config.ppo": ("PPOConfig",),
    "objectives.config.trpo": ("TRPOConfig",),
    "objectives.config.policy_gradient": (
        "DAPOConfig",
        "DrGRPOConfig",
        "GRPOConfig",
        "GRPOPlusConfig",
        "GSPOConfig",
        "REBELConfig",
        "REINFORCEConfig",
        "RLOOConfig",
    ),
    "objectives.config.preferences": (
        "APODownConfig",
        "APOZeroConfig",
        "BPOConfig",
        "CPOConfig",
        "DPOConfig",
        "DiscoPOPConfig",
        "IPOConfig",
        "KTOConfig",
        "NashMDConfig",
        "ORPOConfig",
        "OnlineAPODownConfig",
        "OnlineAPOZeroConfig",
        "OnlineCPOConfig",
        "OnlineDPOConfig",
        "OnlineDiscoPOPConfig",
        "OnlineIPOConfig",
        "OnlineORPOConfig",
        "OnlineSLiCConfig",
        "OnlineSimPOConfig",
        "SLiCConfig",
        "SimPOConfig",
    ),
}
HOME = {name: home for home, names in HOMES.items() for name in names}
__all__ = sorted(HOME)


def __getattr__(name: str) -> Any:
    if name not in HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
