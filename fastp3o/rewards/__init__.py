"""What is maximised.

reward.py        what every reward is: rollouts -> a number for each response; loading one by name
reward_model.py  the score of a reward model
function.py      a user's Python function of texts
scaling.py       rewards divided by a running standard deviation, and bounded
"""
