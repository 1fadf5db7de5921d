"""The online objectives, by the names that `fastp3o online --objective` takes."""

from fastp3o.objectives.config import distillation, p3o, policy_gradient, ppo, preferences, trpo
from fastp3o.objectives.config.base import OnlineConfig

OBJECTIVES: dict[str, type[OnlineConfig]] = {
    "p3o": p3o.P3OConfig,
    "ppg": p3o.PPGConfig,
    "reinforce": policy_gradient.REINFORCEConfig,
    "rloo": policy_gradient.RLOOConfig,
    "grpo": policy_gradient.GRPOConfig,
    "dr_grpo": policy_gradient.DrGRPOConfig,
    "dapo": policy_gradient.DAPOConfig,
    "grpo_plus": policy_gradient.GRPOPlusConfig,
    "gspo": policy_gradient.GSPOConfig,
    "cispo": policy_gradient.CISPOConfig,
    "sapo": policy_gradient.SAPOConfig,
    "vespo": policy_gradient.VESPOConfig,
    "rebel": policy_gradient.REBELConfig,
    "copg": policy_gradient.CoPGConfig,
    "oapl": policy_gradient.OAPLConfig,
    "ppo": ppo.PPOConfig,
    "trpo": trpo.TRPOConfig,
    "online_dpo": preferences.OnlineDPOConfig,
    "online_ipo": preferences.OnlineIPOConfig,
    "online_simpo": preferences.OnlineSimPOConfig,
    "online_orpo": preferences.OnlineORPOConfig,
    "online_cpo": preferences.OnlineCPOConfig,
    "online_slic": preferences.OnlineSLiCConfig,
    "online_apo_zero": preferences.OnlineAPOZeroConfig,
    "online_apo_down": preferences.OnlineAPODownConfig,
    "online_discopop": preferences.OnlineDiscoPOPConfig,
    "bpo": preferences.BPOConfig,
    "nash_md": preferences.NashMDConfig,
    "distillation": distillation.DistillationConfig,
}
