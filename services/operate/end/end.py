"""Ends a run for good, whether its processes run or not.

It records the end, which all processes of the run follow. If the run is paused, it starts the
services that end tasks. After a pause the consumer group of the agents is empty. But it is empty
also while a run starts, and workers that were killed count as members until their session ends. So
in doubt it waits whether a task ends.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from dataclasses import replace

from headrace.errors import UsageError
from headrace.schemas.events import RunStateEntered
from headrace.services.agent.gateway.gateway_key import KEY
from headrace.services.log.event_log import EventLog
from headrace.services.namespace.apply import shared_partitions
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import connect
from headrace.services.namespace.lookup import find_namespace
from headrace.services.namespace.run_life import enter, read_life
from headrace.services.operate.options import say_unless
from headrace.services.operate.run.progress import Progress
from headrace.services.operate.run.run import LocalRun
from headrace.services.operate.run.run_stack import running_stack
from headrace.services.operate.run.watch import follow_progress
from headrace.services.operate.run_references import fetch_models

SERVICES = ("scheduler", "agent", "gateway")
"""The services that end tasks."""
QUIET_S = 10.0
"""If no task has ended for so many seconds, no process of the run is there. A run that has started
less long ago may have processes that still start."""
ENTER_S = 5.0
"""Seconds that another process has to record `ended`, once all tasks have ended."""
TICK_S = 0.5


async def end_run(cluster: ClusterConfig, reason: str, *, quiet: bool) -> RunStateEntered:
    """Ends the run of `cluster.namespace`, or else the newest one that has not ended.

    Starts the local stack if the configuration names no cluster, and stops it if it started it.
    Returns the record of the end, also if the run has ended already. Raises UsageError if there is
    no run.
    """
    say = say_unless(quiet)
    async with (
        running_stack(cluster, say) as (stack, located),
        connect(located, f"end-{os.getpid()}") as connection,
    ):
        topics, life = await find_namespace(
            connection, cluster.namespace, lambda life: life.ended is None and not life.replay_of
        )
        if life.ended is not None:
            others = "" if cluster.namespace else ", and this broker has no run that goes on"
            say(f"the run of namespace {topics.namespace} has ended already{others}")
            return life.ended
        recipe, log = life.recipe(), await connection.writing_log(topics)
        if life.ending is None:
            await enter(log, "ending", recipe, reason)
        say(f"ending the run of namespace {topics.namespace}")
        ended = None if stack.ours else await _end_by_others(log, Progress(recipe), life.started_at)
        if ended is not None:
            return ended
        if cluster.namespace is None and not cluster.folder(topics.namespace).exists():
            # Its recipe names code, and anybody may have written it.
            raise UsageError(
                f"no process ends the tasks of namespace {topics.namespace}, and its run was not "
                "started in this state folder. To run its agents' code here, name it with "
                f"--namespace {topics.namespace}"
            )
        await asyncio.to_thread(fetch_models, recipe, cluster, say, weights=False)
        # A gateway refuses to start without a key. Nobody can use this one.
        os.environ.setdefault(KEY, secrets.token_urlsafe(32))
        run = LocalRun(
            recipe,
            replace(located, namespace=topics.namespace),
            quiet=quiet,
            services=SERVICES,
            end=reason,
            on_interrupt="stopping; `headrace end` continues",
        )
        run.judge(await run.execute())
        life = await read_life(log)
        assert life.ended is not None
        return life.ended


async def _end_by_others(
    log: EventLog, progress: Progress, started_at: float
) -> RunStateEntered | None:
    """Waits while other processes end the tasks. Returns None if nothing ends any more."""
    agents, _ = shared_partitions(log.topics, "agent")
    caught_up = asyncio.Event()
    following = asyncio.create_task(follow_progress(log, progress, caught_up.set))
    try:
        changed_at, count = time.monotonic(), -1
        while time.monotonic() < changed_at + QUIET_S:
            if following.done():
                following.result()
            life = await read_life(log)
            if life.ended is not None:
                return life.ended
            if progress.tasks_ended != count:
                changed_at, count = time.monotonic(), progress.tasks_ended
            starting = time.time() < started_at + QUIET_S
            paused = not starting and await log.broker.members(agents) == 0
            drained = caught_up.is_set() and progress.drained
            if drained and (paused or time.monotonic() > changed_at + ENTER_S):
                assert life.ending is not None
                await enter(log, "ended", progress.recipe, life.ending.reason)
            elif paused and caught_up.is_set():
                return None
            await asyncio.sleep(TICK_S)
        return None
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
