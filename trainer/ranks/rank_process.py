"""A rank above 0: `python -m headrace.trainer.ranks.rank_process RANK PORT SIZE TIMEOUT DEVICE`.

Rank 0 starts it on its own machine. It reads no log and has no state: it does what rank 0 does.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store, TCPStore

from headrace.errors import HeadraceError
from headrace.services.models.torch_models import pick_device
from headrace.trainer.ranks.rank_group import RankGroup, own_gpu
from headrace.trainer.ranks.shared_learner import follow

logger = logging.getLogger(__name__)


def main() -> None:
    """Joins the other ranks and follows rank 0."""
    rank, port, size = map(int, sys.argv[1:4])
    # Ctrl-C and SIGTERM are for rank 0, whose end is the end of this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(
        format=f"%(asctime)s.%(msecs)03dZ %(levelname)-7s trainer rank {rank} %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
        level=logging.INFO,
    )
    try:
        store = TCPStore("127.0.0.1", port, is_master=False)
        follow_rank_0(store, rank, size, float(sys.argv[4]), sys.argv[5])
    except HeadraceError as error:
        logger.error("%s", error)
        sys.exit(error.exit_code)


def follow_rank_0(
    store: Store,
    rank: int,
    size: int,
    timeout_s: float,
    device: str,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Joins as a rank above 0, and returns when rank 0 has ended cleanly. Blocks.

    Raises DependencyError if the other ranks are gone. `check` may raise an error while it waits
    for the others to join. Later it ends with rank 0 alone, which may have a checkpoint to write.
    """
    own_gpu(device, rank)
    group = RankGroup(store, rank, size, timeout_s, pick_device(device).type, check)
    logger.info("rank %d of %d has joined", rank, size)
    try:
        follow(group)
    finally:
        group.end_beats()


if __name__ == "__main__":
    main()
