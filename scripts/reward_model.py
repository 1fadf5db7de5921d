"""Stage 2, reward modelling. `python scripts/reward_model.py --help` explains every option."""

from fastp3o.config import RewardModelConfig, parse
from fastp3o.reward_modeling import train

if __name__ == "__main__":
    train(parse(RewardModelConfig))
