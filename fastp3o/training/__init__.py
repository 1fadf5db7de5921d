"""The machinery of a training loop.

run.py          what goes on around the steps: metrics, evaluations, checkpoints, stopping and resuming
minibatches.py  rollouts -> packed minibatches with log-probs -> an optimizer step
optimizer.py    AdamW, fp32 masters, loss scaling
order.py        seeds, and which examples a step takes
checkpoints.py  models on disk
states/         states on disk, from which a run goes on exactly
run_folder.py   whose folder it is, who writes to it
log_files.py    metrics.jsonl and eval.jsonl
durable.py      files and folders that are complete or absent
stopping.py     signals
processes.py    what one process decides for all
reporting.py    metrics as files, trackers, a progress bar
ratio_noise.py  how much of a ratio is rounding
sampler_gap.py  how far a sampler's log-probs are from those of the packed rows
finite.py       values that are not finite
memory.py       the memory that a run will take
"""
