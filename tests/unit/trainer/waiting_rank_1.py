"""Rank 1 waits for what rank 0 does next: `waiting_rank_1.py TIMEOUT_S SERVER WHAT`.

SERVER is the rank that serves the store. WHAT is what rank 0 does once both have joined: `stop`
(SIGSTOP), or `idle` for three times the time-out and then end cleanly. With `stop-early` it stops
when both have joined, before it connects to rank 1. With `stop-joined` it stops as soon as rank 1
has joined, and with `stop-joining` it has not joined itself by then. Prints how rank 1 ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from headrace.errors import DependencyError
from headrace.services.processes.guard import die_with_parent
from headrace.trainer.ranks.rank_group import RankGroup, loopback_variables, serve_store
from headrace.trainer.ranks.rank_process import follow_rank_0
from headrace.trainer.ranks.shared_learner import END

PIPE = os.pipe()


def meet(serves: bool) -> Store:
    """Returns the store, which this process serves or the other one does."""
    if serves:
        store, port = serve_store()
        os.write(PIPE[1], f"{port:8}".encode())
        return store
    return TCPStore("127.0.0.1", int(os.read(PIPE[0], 8)), is_master=False)


def stop_after(key: str, store: Store) -> None:
    """Stops this process once rank 1 has set a key."""
    while not store.check([key]):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGSTOP)


def lead(serves: bool, timeout_s: float, what: str) -> None:
    """Is rank 0."""
    store = meet(serves)
    if what in ("stop-joined", "stop-joining"):
        if what == "stop-joined":
            store.set("joined/0", "")
        stop_after("joined/1", store)
    if what == "stop-early":
        dist.init_process_group = lambda *_, **__: stop_after("beat/1", store)
    group = RankGroup(store, 0, 2, timeout_s, "cpu")
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3 * timeout_s)
    group.tell(END)
    group.close()


def main() -> None:
    timeout_s, server, what = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.environ |= loopback_variables()
    if not os.fork():
        die_with_parent()  # Not before: rank 1 must be able to end while rank 0 is stopped.
        try:
            lead(server == 0, timeout_s, what)
        finally:
            os._exit(0)
    try:
        follow_rank_0(meet(server == 1), 1, 2, timeout_s, "cpu")
        print("ended cleanly")
    except DependencyError as error:
        print(error)


if __name__ == "__main__":
    main()
