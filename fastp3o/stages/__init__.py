"""What a script runs, from a configuration to a finished model.

sft.py, reward_model.py  stages 1 and 2, each a task of supervised.py
preference/              fixed preferences, also tasks of supervised.py: pairs, and KTO's single responses
online/                  stage 3, any online objective: the algorithm from top to bottom
generate/                sampling without training: responses that their rewards choose, as data for the others
setup.py                 what every stage does before its loop
models.py, samplers.py   policy, reference, rewards, and what is sampled from, for all but the first two
"""
