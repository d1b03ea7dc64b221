"""Agents that are Python programs, started for each attempt and forked from a fork server.

The program imports the package `openai` and asks its model once. The model is the scripted engine,
which answers at once. Both ways alternate in one run, because the machine may do other work.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from headrace.infra import local
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import RESULTS
from headrace.services.agent.gateway.program_process import running
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.operate.serve.process_setup import THREAD_VARIABLES
from headrace.services.processes.allowed_environment import allowed_environment
from headrace.services.processes.program_starter import ProgramStarter
from tests.bench.deployment import deployed
from tests.bench.episodes import Driver
from tests.bench.report import Figure

LIVE = 32
ROUNDS = 2
WAYS = {"started": False, "forked": True}
"""The two ways, and the option `preload` of each."""
COMMAND = [sys.executable, str(Path(__file__).with_name("program.py"))]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


async def programs(cluster: ClusterConfig, scale: float) -> list[Figure]:
    """Time of a program alone, and of whole episodes, both with 32 at once."""
    live = max(2, int(LIVE * scale))
    return [*await _alone(live), *await _episodes(cluster, live)]


async def _alone(live: int) -> list[Figure]:
    environment = allowed_environment() | dict.fromkeys(THREAD_VARIABLES, "1")
    starters = {way: ProgramStarter(COMMAND, None) for way in WAYS}
    starters["forked"].open()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}

    async def play(starter: ProgramStarter) -> None:
        async with running(starter, environment, b"{}\n") as program:
            ended = await program
            if ended.code:
                raise RuntimeError(f"the program failed: {ended}")

    try:
        for starter in starters.values():
            await play(starter)  # the fork server imports, and files come into the page cache
        for _ in range(ROUNDS):
            for way, starter in starters.items():
                began = time.perf_counter()
                await asyncio.gather(*(play(starter) for _ in range(live)))
                seconds[way].append(time.perf_counter() - began)
    finally:
        for starter in starters.values():
            await starter.aclose()
    return _figures(f"{live} programs at once, from start to end", seconds, live)


def _recipe(model: Path, live: int) -> Recipe:
    def agent(preload: bool) -> dict[str, Any]:
        return {"use": "command", "options": {"command": COMMAND, "preload": preload}}

    return Recipe.model_validate(
        {
            "name": "bench-programs",
            "tasks": {
                "agent": "forked",
                "samples": 1,
                "environment": None,
                "max_tokens": 64,
                "deadline_s": 600,
            },
            "agents": {way: agent(preload) for way, preload in WAYS.items()} | {"default": {}},
            "scheduler": {"live_episodes": live},
            "policies": {
                "default": {
                    "model": str(model),
                    "training": False,
                    "engine": {"use": "scripted", "options": {"count": 4}},
                    "sampling": {"max_tokens": 8},
                }
            },
        }
    )


async def _episodes(cluster: ClusterConfig, live: int) -> list[Figure]:
    model = cluster.state / "chat-model"
    shutil.copytree(Path(local.__file__).parents[1] / "models" / "tiny-llama", model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    async with deployed(cluster, _recipe(model, live)) as deployment:
        await deployment.publish_initial()
        drivers = {way: Driver(deployment, way) for way in WAYS}
        services = ("agent", "inference", "scheduler")
        async with deployment.serving(*services), deployment.following(RESULTS) as results:
            for driver in drivers.values():
                await driver.run(results, 1, 1)
            for _ in range(ROUNDS):
                for way, driver in drivers.items():
                    seconds[way].append((await driver.run(results, live, live))[0])
    return _figures(f"episodes of programs, {live} live", seconds, live)


def _figures(what: str, seconds: dict[str, list[float]], count: int) -> list[Figure]:
    each = {way: median(values) / count for way, values in seconds.items()}
    ratio = each["started"] / each["forked"]
    return [
        Figure(
            f"{what}, {way}",
            f"{1 / each[way]:.2f}/s",
            note=f"{each[way] * 1000:,.0f} ms each; rounds of "
            + ", ".join(f"{value:.1f}" for value in values)
            + f" s; load {os.getloadavg()[0]:.0f}"
            + (f"; {ratio:.1f} times faster" if way == "forked" else ""),
        )
        for way, values in seconds.items()
    ]
