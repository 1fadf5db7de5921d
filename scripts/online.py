"""Stage 3 with any objective. `python scripts/online.py --help` lists them, `--objective NAME --help` explains one."""

from fastp3o.config import parse_chosen
from fastp3o.objectives import gspo, nash_md, online_dpo, online_ipo, p3o, ppg, ppo, rebel, reinforce
from fastp3o.objectives.grpo import DAPOConfig, DrGRPOConfig, GRPOConfig, GRPOPlusConfig
from fastp3o.script import run_script
from fastp3o.stages.online import train

OBJECTIVES = {
    "p3o": p3o.P3OConfig,
    "ppg": ppg.PPGConfig,
    "reinforce": reinforce.REINFORCEConfig,
    "rloo": reinforce.RLOOConfig,
    "grpo": GRPOConfig,
    "dr_grpo": DrGRPOConfig,
    "dapo": DAPOConfig,
    "grpo_plus": GRPOPlusConfig,
    "gspo": gspo.GSPOConfig,
    "rebel": rebel.REBELConfig,
    "ppo": ppo.PPOConfig,
    "online_dpo": online_dpo.OnlineDPOConfig,
    "online_ipo": online_ipo.OnlineIPOConfig,
    "bpo": online_dpo.BPOConfig,
    "nash_md": nash_md.NashMDConfig,
}

if __name__ == "__main__":
    run_script(lambda: train(parse_chosen(OBJECTIVES)))
