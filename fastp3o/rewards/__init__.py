"""What is maximised.

config.py        the flags of rewards and penalties
names.py         what the name of a reward says it is
reward.py        what every reward is: rollouts -> a number for each response; loading one by name
reward_model.py  the score of a reward model
translation.py   texts of the policy in the tokens of a reward model with another vocabulary
function.py      a user's Python function of texts, and of columns of the data
remote.py        what an endpoint answers
verifiable.py    rewards of tasks whose answers are known
penalties.py     what is subtracted for the form of a response: its end, its length, its repetitions
scoring.py       all of it added up: rewards with their weights, less penalties
pairs.py         all pairs of the responses to a prompt, and their differences
scaling.py       rewards divided by a running standard deviation, and bounded
"""
