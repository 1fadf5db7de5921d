"""What sets one online algorithm apart from another; everything else in the training loop is the same for all.

base.py        what every objective is: packed rows with rewards and log-probs in, loss and metrics out
config.py      the settings that all have in common
p3o.py         Pairwise Proximal Policy Optimization
ppo.py         token-level PPO, with critic.py and advantages.py
online_dpo.py  online DPO
offline/       objectives of fixed preferences, each a configuration with its loss
"""
