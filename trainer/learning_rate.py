"""The learning rate of each optimizer update: the warmup, then a schedule."""

from __future__ import annotations

import math

from headrace.schemas.recipe.policy import Training


def learning_rate_at(settings: Training, update: int, highest: float) -> float:
    """Returns the learning rate of an update, counted from 1 since version 0.

    `highest` is the rate at the end of the warmup. A falling schedule never raises a rate that is
    already below `final_learning_rate`.
    """
    if update <= settings.warmup_updates:
        return highest * update / settings.warmup_updates
    if settings.schedule == "constant" or settings.total_updates is None:
        return highest
    after = update - settings.warmup_updates
    done = min(1.0, after / (settings.total_updates - settings.warmup_updates))
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    final = min(settings.final_learning_rate, highest)
    return final + (highest - final) * left
