"""The table of metrics is whole. A fixture of all tests here holds the lines of every run against it."""

from fastp3o.objectives.ppo import PPOConfig
from fastp3o.training.loop import train
from tests.fastp3o.runs import config


def test_the_lines_of_a_run_with_many_parts_are_held_against_it(workplace, tiny_model):
    settings = {
        "reward": "rewards_for_tests:vowels,rewards_for_tests:varied",
        "gold_reward": "rewards_for_tests:vowels",
    }
    settings |= {"length_penalty": 0.01, "entropy_coef": 0.1, "dynamic_sampling": 1, "target_kl": 1.0, "updates": 1}
    settings |= {"ptx_data": "sft.jsonl", "sampler_ratio_cap": 2.0, "rounds_ahead": 1}
    train(config(tiny_model, "run", PPOConfig, eval_prompts="prompts.jsonl", **settings))
