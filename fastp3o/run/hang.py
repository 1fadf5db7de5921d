"""Ends a run of several processes once one of them hangs, and says which one and where."""

import json
import os
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# In `--hang_minutes`; counted, not timed: a job that was suspended as a whole continues.
CHECKS = 20


class HangWatch:
    """A thread that compares this process with the others, through torch's store, and ends it when
    one of them hangs.

    Each tells its place and how many collectives it has begun, the same way with gloo and NCCL,
    whose own time limits name no process. One hangs if it tells nothing more, being stopped or out
    of reach; or, in a `short` place, if no process moves and none has begun fewer collectives. In
    other places one may work alone, for hours.

    minutes: how long nothing happens then; 0: no watch. mesh: None for one process, which needs no
    watch.
    """

    def __init__(self, minutes: float, mesh: DeviceMesh | None):
        self.seconds, self.check, self.left = minutes * 60, 0, threading.Event()
        self.step, self.place, self.short = "the start", "loading", False
        self.groups: set[Any] = (
            {dist.group.WORLD, *mesh.get_all_groups()} if mesh and minutes else set()
        )
        internals: Any = dist.distributed_c10d
        self.store: Any = internals._get_default_store().clone() if self.groups else None

    def __enter__(self) -> None:
        if self.groups:
            threading.Thread(target=self.compare, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.left.set()

    def at(self, place: str, *, short: bool = False) -> None:
        """Notes where in its step the main thread is. short: whether no process may be alone there
        for long.
        """
        self.place, self.short = place, short
        self.tell()

    def tell(self) -> None:
        begun = sum(group._get_sequence_number_for_group() for group in self.groups)
        told = [
            self.check,
            begun,
            self.short,
            f"{socket.gethostname()} ({self.step}, {self.place})",
        ]
        with suppress(RuntimeError):
            # The store has gone with a process, and this one learns that elsewhere.
            if self.groups:
                self.store.set(f"hang/{dist.get_rank()}", json.dumps(told))

    def compare(self) -> None:
        ranks = range(dist.get_world_size())
        seen: deque[list[list[Any]]] = deque(maxlen=CHECKS + 1)
        while not self.left.wait(self.seconds / CHECKS):
            # The store is in process 0, or in torchrun. It answers nothing if that is stopped.
            late = threading.Timer(
                self.seconds, self.end, ["process 0 or torchrun there, which has the store"]
            )
            late.daemon = True
            late.start()
            self.check += 1
            self.tell()
            try:
                seen.append(
                    [
                        json.loads(process)
                        for process in self.store.multi_get([f"hang/{n}" for n in ranks])
                    ]
                )
            except RuntimeError:
                return
            finally:
                late.cancel()
            before, now, fewest = seen[0], seen[-1], min(process[1] for process in seen[-1])
            still = all(
                process[1:] == other[1:] for process, other in zip(before, now, strict=True)
            )
            silent = [n for n in ranks if now[n][0] == before[n][0]]
            hung = silent or [n for n in ranks if still and now[n][1:3] == [fewest, True]]
            if hung and len(seen) > CHECKS:
                self.end(", ".join(f"process {n} on {now[n][3]}" for n in hung))

    def end(self, where: str) -> None:
        said = f"error: the run hangs: no progress for {self.seconds / 60:g} minutes (--hang_minutes) in {where}; "
        if not self.left.is_set():
            with suppress(OSError):
                os.write(2, f"\n{said}--resume continues from the newest state\n".encode())
        # The others say it, too, before they see that this one has ended.
        if not self.left.wait(2 * self.seconds / CHECKS):
            os._exit(1)  # the main thread waits in a collective, where no exception reaches it
