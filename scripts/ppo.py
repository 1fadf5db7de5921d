"""PPO, to compare P3O with. `python scripts/ppo.py --help` explains every option."""

from fastp3o.baselines.config import PPOConfig
from fastp3o.baselines.ppo import PPO
from fastp3o.config import parse
from fastp3o.trainer import train

if __name__ == "__main__":
    train(parse(PPOConfig), PPO)
