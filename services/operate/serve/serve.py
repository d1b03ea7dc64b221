"""Runs one service of a run as one process.

The service is imported first and the cluster is read afterwards: a child process of `headrace run`
imports torch while the broker is still starting, and then reads from its pipe where to connect.
SIGTERM, Ctrl-C, the end of the run and the end of the parent process stop the service cleanly. If
that takes more than 10 s, the process exits by force.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from typing import Any

from headrace.errors import UsageError
from headrace.infra import local
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.base.files import private_folder
from headrace.services.namespace.apply import require_same
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import connect, locate
from headrace.services.namespace.run_life import RunLife, follow_life
from headrace.services.operate.find_versions import resolve
from headrace.services.operate.metrics_server import SERVICE_INFO, serve_metrics
from headrace.services.operate.run_references import fetch_models
from headrace.services.operate.serve.loop_watch import LoopWatch
from headrace.services.operate.serve.open_context import claim_models, open_context
from headrace.services.operate.serve.process_setup import (
    end_garbage_collection,
    pause_garbage_collector,
    set_up_process,
    tune_garbage_collector,
)
from headrace.services.operate.serve.services import POLICY_SERVICES, Serve, load_service
from headrace.services.operate.serve.stopper import Stopper
from headrace.services.worker.life_records import LifeRecords
from headrace.services.worker.service_context import ServiceContext

logger = logging.getLogger(__name__)

DRAINING = ("inference",)
"""Services that can finish what they have and take nothing new."""


def serve(
    service: str,
    recipe: Recipe,
    cluster: ClusterConfig,
    *,
    policy: str | None,
    listen: str,
    metrics: tuple[str, int],
    parent_fd: int | None,
    drain: bool = False,
) -> None:
    """Runs a service until it ends. Raises HeadraceError if it fails.

    `policy` and `listen` are those of `load_service`. `metrics` is the address and port of
    `/metrics`; port 0 disables metrics. `parent_fd` is the reading end of the pipe from `run`: it
    carries one line with the cluster's configuration, and it ends when `run` ends. With `drain`,
    the first SIGTERM drains the service.
    """
    began_s = time.time()
    check_policy(service, policy, recipe)
    if drain and service not in DRAINING:
        raise UsageError(f"--drain is only for {', '.join(DRAINING)}: leave it out for {service}")
    if parent_fd is None:  # Otherwise `run` has done it.
        cluster = replace(cluster, role=service)
        recipe = resolve(recipe, cluster, logger.info)
        fetch_models(recipe, cluster, logger.info, weights=service == "trainer")
    set_up_process(recipe, service, policy)
    address, port = metrics
    if port:
        serve_metrics(address, port)
        named = {"namespace": cluster.namespace or recipe.name, "policy": policy or ""}
        SERVICE_INFO.info({"service": service, **named})
    pause_garbage_collector()
    run = load_service(service, recipe, policy, listen)
    if parent_fd is None:
        cluster = locate(cluster)
    else:
        # Without a buffer, nothing after the line is read.
        with open(parent_fd, "rb", buffering=0, closefd=False) as pipe:
            line = pipe.readline()
        if not line:
            logger.info("the parent process ended before it said where to connect")
            return
        cluster = replace(ClusterConfig.from_json(line.decode()), role=service)
        # So the run's local broker lives until this process ends, even if `run` is killed.
        private_folder(cluster.state)
        local.hold(cluster.state)
    tune_garbage_collector()
    try:
        own = policy if policy is not None and len(recipe.policies) > 1 else ""
        process = _Process(service, own, began_s, parent_fd, drain)
        asyncio.run(_serve(run, process, recipe, cluster))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        end_garbage_collection()


def check_policy(service: str, policy: str | None, recipe: Recipe) -> None:
    """Raises UsageError if the service takes no `--policy`, or the recipe has no such policy."""
    if policy is None:
        return
    if service not in POLICY_SERVICES:
        raise UsageError(
            f"--policy is only for {', '.join(POLICY_SERVICES)}: leave it out for {service}"
        )
    if policy not in recipe.policies:
        raise UsageError(
            f"the recipe has no policy {policy!r}: choose from {', '.join(recipe.policies)}"
        )


@dataclass(frozen=True)
class _Process:
    """The process that runs the service."""

    service: str
    policy: str
    """Empty if it serves all policies, or the only one."""
    began_s: float
    parent_fd: int | None
    drain: bool
    """Whether SIGTERM drains it."""


async def _serve(run: Serve, process: _Process, recipe: Recipe, cluster: ClusterConfig) -> None:
    service = process.service
    stopping, ending, draining = asyncio.Event(), asyncio.Event(), asyncio.Event()
    drain_s = recipe.workers.drain_s if service in DRAINING else None
    stopper = Stopper(stopping, draining, drain_s)
    stopper.stop_on_signals(drain=process.drain)
    if process.parent_fd is not None:
        stopper.stop_with_parent(process.parent_fd)
    namespace = cluster.namespace or recipe.name
    worker_id = f"{service}-{socket.gethostname()}-{os.getpid()}"

    async with connect(cluster, worker_id) as connection:
        context = await open_context(
            connection, recipe, replace(cluster, namespace=namespace), stopping, ending, draining
        )
        async with aclosing(follow_life(context.log)) as lives:
            life = await anext(lives)
            check_run(life, recipe, namespace)
            _on_life(life, context, stopper)
            if service == "trainer":  # Otherwise a prune might remove what the recipe refers to.
                await asyncio.to_thread(claim_models, recipe, context.blobs)
            if not stopping.is_set():
                logger.info("serving %s in namespace %s", service, namespace)
                if service != "inference":
                    context.ready.set()
                life_records = LifeRecords(
                    *(context.log.send, worker_id, service, process.policy, process.began_s),
                    context.ready,
                )
                with closing(LoopWatch()):
                    async with life_records.recording():
                        following = _follow(lives, context, stopper)
                        await _run_beside(following, run(context, cluster), stopper)


async def _run_beside(
    following: Coroutine[Any, Any, None], serving: Coroutine[Any, Any, None], stopper: Stopper
) -> None:
    """Runs the service and follows the state of its run. Returns when the service ends."""
    follower, service = asyncio.create_task(following), asyncio.create_task(serving)
    try:
        await asyncio.wait({service, follower}, return_when=asyncio.FIRST_COMPLETED)
        if not service.done():
            stopper.stop("the state of the run can no longer be followed")
        try:
            await service
        except BaseException:
            stopper.stop("the service failed")  # Code that hangs may keep the loop from ending.
            raise
        if follower.done():
            follower.result()
        logger.info("ended cleanly")
    finally:
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)


async def _follow(lives: AsyncIterator[RunLife], context: ServiceContext, stopper: Stopper) -> None:
    async for life in lives:
        _on_life(life, context, stopper)


def _on_life(life: RunLife, context: ServiceContext, stopper: Stopper) -> None:
    if life.ending is not None:
        context.ending.set()
    if life.ended is not None:
        stopper.stop("the run has ended")


def check_run(life: RunLife, recipe: Recipe, namespace: str) -> None:
    """Raises UsageError if the run has not started, or if it has another recipe."""
    if life.started is None:
        raise UsageError(
            f"no run has started in namespace {namespace}: start it with `headrace apply RECIPE`"
        )
    require_same(life, recipe, namespace)
