"""The machinery of a training loop.

run.py          what goes on around the steps: metrics, evaluations, checkpoints, stopping and resuming
minibatches.py  rollouts -> packed minibatches with log-probs -> an optimizer step
optimizer.py    AdamW, fp32 masters, loss scaling
order.py        seeds, and which examples a step takes
checkpoints.py  models and states on disk
reporting.py    metrics as files, trackers, a progress bar
sampler_gap.py  how far a sampler's log-probs are from those of the packed rows
ratio_noise.py  how much of a ratio is rounding
sampler_gap.py  how far a sampler's log-probs are from those of the packed rows
finite.py       values that are not finite
memory.py       the memory that a run will take
"""
