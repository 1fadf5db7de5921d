"""What came of a run.

evaluate.py    reward and KL to the reference on fixed prompts
frontier.py    the KL-reward frontier of runs: table and plot
matched_kl.py  gains at equal KL, with intervals over seeds
calibration.py how often a reward model is right, and whether it is as sure of it
win_rates/     two checkpoints head to head
"""
