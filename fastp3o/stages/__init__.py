"""What a script runs, from a configuration to a finished model.

sft.py, reward_model.py  stages 1 and 2, each a task of supervised.py
preference/              fixed preferences, also tasks of supervised.py: pairs, and KTO's single responses
online.py                stage 3, any online objective: the loop from top to bottom
online_setup.py          what that loop works with; online_models.py and online_samplers.py, the others too
online_report.py         what it says of an update
generate.py              sampling without training: responses that their rewards choose, as data for the others
generate_config.py, generate_setup.py, generate_report.py   its options, what it works with, what it writes and says
selection.py             which responses that is, and the records that they become
samples.py               the file of all responses and rewards, which a resumed run goes on with
setup.py                 what every stage does before its loop
"""
