"""States on disk, from which a run goes on exactly.

state/step-000050/                         the state after step 50; the last two states stay
    manifest.json                          written last: what the run was, and a checksum of every file
    shard-00001-model-00001-of-00002.safetensors   tensors, each process its part (torch.distributed.checkpoint)
    process-00000.json                     the random generators of a process
    counters.json                          numbers of the loss scale, the schedule, the scaling of rewards
"""
