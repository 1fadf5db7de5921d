"""PPO, to compare P3O with. `python scripts/ppo.py --help` explains every option."""

from fastp3o.config import parse
from fastp3o.objectives.ppo import PPOConfig
from fastp3o.stages.online import train

if __name__ == "__main__":
    train(parse(PPOConfig))
