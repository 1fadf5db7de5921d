"""States on disk, from which a run goes on exactly.

state/step-000050/                         of step 50; the last two stay
    manifest.json                          written last: what the state is of, and a checksum of every file
    shard-00001-model-00001-of-00002.safetensors   tensors, each process its part (torch.distributed.checkpoint)
    process-00000.json                     the random generators of a process
    counters.json                          of the loss scale, the schedule, the scaling of rewards

store.py         saves states, finds the newest whole one, loads it
manifest.py      what a state is of, and whether it is whole
tensors.py       named tensors as safetensors, on any number of processes
generators.py    the random generators of a process as JSON
fingerprints.py  hashes of data, models and reward functions
changes.py       what may change when a run is resumed
"""
