"""Reads the tasks that were submitted, so that what they need can be got before they start."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing

from headrace.schemas.events import TaskSubmitted
from headrace.schemas.topics import TASKS
from headrace.services.env.setup import Expecting, Setup
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import Back, CaughtUp, follow_events

NEWEST = 256
"""Tasks that a worker reads when it starts. Some of them have started: that does no harm."""


async def expect_submitted(log: EventLog, setups: Mapping[str, Setup]) -> None:
    """Passes the environment of each submitted task to its setup, for ever.

    Tasks that are refused need none. Raises UsageError if the recipe names keys and the package
    `cryptography` is missing.
    """
    expecting = {
        key: setup
        for key, setup in setups.items()
        if isinstance(setup, Expecting) and setup.expects
    }
    if not expecting:
        await asyncio.Event().wait()
    tasks = Partition(log.topics.name(TASKS), 0)
    async with aclosing(follow_events(log, {tasks: Back(NEWEST)})) as events:
        async for item in events:
            if isinstance(item, CaughtUp) or not isinstance(item.event, TaskSubmitted):
                continue
            use = item.event.environment
            if use is None or (setup := expecting.get(use.use)) is None:
                continue
            if not item.refusal(log.topics.trusted, item.event.tenant):
                setup.expect(use)
