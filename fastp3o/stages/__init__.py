"""What a script runs, from a configuration to a finished model.

sft.py, reward_model.py  stages 1 and 2, each a task of supervised.py
online.py                stage 3, any online objective: the loop from top to bottom
online_setup.py          what that loop works with
online_report.py         what it says of an update
setup.py                 what every stage does before its loop
"""
