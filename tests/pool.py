"""Processes for work that takes long: they end with who started them, however that ends."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait


def processes(jobs: int) -> ProcessPoolExecutor:
    """A pool of so many processes."""
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_follow_parent)


def _follow_parent() -> None:
    gc.freeze()  # what is imported is no garbage
    parent = parent_process()
    assert parent is not None

    def end() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end, name="parent", daemon=True).start()
