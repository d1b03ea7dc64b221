"""A loss whose updates become slow: first the trainer waits for episodes, then they wait for it."""

from __future__ import annotations

import time

import torch

from headrace.trainer.losses.loss import MicroBatch

QUICK = 25
"""Updates of a trainer's process that are quick."""
SLOW_S = 4.0

_updates = 0


def slower(batch: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
    """Reinforce, which waits after the first updates."""
    global _updates
    _updates += 1
    if _updates > QUICK:
        time.sleep(SLOW_S)
    return -batch.advantages * logprobs
