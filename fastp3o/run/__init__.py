"""Keeps a run: the loop around steps, its folder, logs, states, models, reports, and how it ends.

run.py                      numbers of steps to a finished run; evaluates and saves between them
folder.py, names.py         what stands in the folder of a run
log.py                      append-only logs of metrics, evaluations, rollouts, samples and verdicts
checkpoint.py, manifest.py, fingerprints.py   states, from which a run goes on exactly
model.py, best.py, card.py, hub.py   the model that trains, as it is saved, described and uploaded
report.py, plot.py          what a run prints, logs and draws
signals.py                  stops
result.py                   the folder of a finished run to a model, a tokenizer and a table

state/step-000050/                         the state after step 50; the last two states stay
    manifest.json                          written last: what the run was, and a checksum of every file
    shard-00001-model-00001-of-00002.safetensors   tensors, each process its part (torch.distributed.checkpoint)
    process-00000.json                     the random generators of a process
    counters.json                          numbers of the loss scale, the schedule, the scaling of rewards
"""
