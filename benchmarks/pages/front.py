"""The front page and the page of memory: a few of the suite's figures."""

from benchmarks.goals import GPU, speedups
from benchmarks.pages.sources import HIDDEN, N, Records, results
from benchmarks.records import GPU_RECORD, figure, select, spread


def memory(records: Records) -> str:
    """Of P3O's loss at all heads, beside PyTorch and TRL's chunks."""
    measured = select(results(records, GPU), N=N, **HIDDEN)
    ours, pytorch, trl = (
        figure(measured, "extra_gb", "{:.1f}", implementation=name)
        for name in ("fastp3o", "eager", "TRL")
    )
    longer = spread(speedups("hidden", "TRL".__eq__)(measured))
    return f"{ours} GB on an H100, PyTorch {pytorch}, TRL's\nchunks {trl} at {longer} × the time"


def in_trl(records: Records) -> str:
    """`linear_logprobs` in place of TRL's own chunks, at all heads, in the precision that both were
    measured in.
    """
    wanted = HIDDEN | {"N": N, "dtype": "bfloat16"}
    measured = results(records, GPU)
    ours = {
        (r["D"], r["V"]): r
        for r in select(measured, implementation="fastp3o linear_logprobs", **wanted)
    }
    trl = {(r["D"], r["V"]): r for r in select(measured, implementation="TRL", **wanted)}
    heads = sorted(ours.keys() & trl.keys())
    time, memory = (
        spread(ours[head][key] / trl[head][key] for head in heads) for key in ("ms", "extra_gb")
    )
    return f"{time} × the time of TRL's own chunks, and {memory} × their memory"


def limit(records: Records) -> str:
    found = select(
        results(records, GPU), level="model", passes="update, prompts of 350, 2 responses of 40"
    )
    device, ratio = records[GPU_RECORD]["environment"]["device"], figure(found, "ratio_to_bare")
    return f"one {device.removeprefix('NVIDIA ')}; an update takes {ratio} × its products' time"


def calculator(records: Records) -> str:
    """Of all updates, which tests/scripts/test_memory.py compares with the formula."""
    updates = [
        r
        for r in select(results(records, GPU), level="model")
        if r["passes"].startswith("update, ")
    ]
    return f"{len(updates)} updates of 1 B took {spread((r['extra_gb'] for r in updates), '{:.1f}')} GB"
