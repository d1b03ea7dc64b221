"""Asks an environment for the files that the task collects, when the agent has ended."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.schemas.events import EpisodeStarted, Failure
from headrace.services.agent.attempt import Attempt, Wake
from headrace.services.agent.episode import Episode
from headrace.services.agent.requests import COLLECT, collect_requested
from headrace.services.agent.stops import AttemptFailed, LogLost, error_of
from headrace.services.base.clock import now

RECORDED_S = 10.0
"""Seconds within which an answer that is recorded must be there."""


async def collect(started: EpisodeStarted, attempt: Attempt, episode: Episode, moved: Wake) -> bool:
    """Adds the files that the task collects, if its environment was reset, to the episode's files.

    Returns False if `moved` came first: the episode is cancelled, or a higher attempt is in the
    log. Raises AttemptFailed if the files can't be had before the deadline.
    """
    request = collect_requested(started, attempt.attempt, episode.action_count)
    if request is None or not episode.action_count:
        return True
    recorded = request.call in attempt.answers
    left_s = RECORDED_S if recorded else max(0.0, started.deadline / 1000 - now())
    asking = asyncio.ensure_future(attempt.ask_to_collect(request))
    ends: set[asyncio.Future[Any]] = {asking, moved.future}
    try:
        await asyncio.wait(ends, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if moved.is_set:
            return False
        if not asking.done():
            message = "the files of the episode were not collected before its deadline"
            raise AttemptFailed(Failure(origin="infrastructure", code=COLLECT, message=message))
        episode.files.add(asking.result())
        return True
    except LogLost as lost:
        raise lost.error from None
    finally:
        if asking.done():
            error_of(asking)  # retrieved, or asyncio would log that it never was
        asking.cancel()
