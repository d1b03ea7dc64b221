"""Measures how long a reset takes: in a new container, a persistent one, and a ready one.

    python -m tests.sandboxes.start_times [DOCKER_HOST] [--rounds 40] [--at-once 1]

The three take turns, so that a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Literal

from headrace.schemas.events import EnvironmentUse
from tests.sandboxes.bench import Bench, bench, claim, view
from tests.sandboxes.docker_engine import docker_engine

Kind = Literal["new", "persistent", "ready"]


async def _one(made: Bench, kind: Kind, task: int) -> float:
    """Returns the seconds of a reset and a first command."""
    mode: Literal["ephemeral", "persistent"] = "persistent" if kind == "persistent" else "ephemeral"
    environment = await made.take(claim(task), mode)
    began = time.monotonic()
    await environment.reset(view())
    took = time.monotonic() - began
    await made.setup.give_back(EnvironmentUse(use="default", mode=mode), environment, fit=True)
    return took


async def measure(host: str, rounds: int, at_once: int) -> dict[Kind, list[float]]:
    """Returns the seconds of each reset."""
    times: dict[Kind, list[float]] = {"new": [], "persistent": [], "ready": []}
    async with bench(host) as plain, bench(host, ready=at_once) as warm:
        await asyncio.gather(*(_one(plain, "persistent", number) for number in range(at_once)))
        for _ in range(rounds):
            while len(await _ready(warm)) < at_once:
                await asyncio.sleep(0.1)
            for kind, made in (("new", plain), ("persistent", plain), ("ready", warm)):
                batch = (_one(made, kind, number) for number in range(at_once))  # type: ignore[arg-type]
                times[kind] += await asyncio.gather(*batch)  # type: ignore[index]
    return times


async def _ready(made: Bench) -> list[str]:
    return [name for name in await made.left() if ".ready." in name]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("host", nargs="?")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=1)
    given = parser.parse_args()
    if given.host:
        times = asyncio.run(measure(given.host, given.rounds, given.at_once))
    else:
        with (
            tempfile.TemporaryDirectory() as name,
            docker_engine(Path(name), Path(name) / "shared") as host,
        ):
            times = asyncio.run(measure(host, given.rounds, given.at_once))
    for kind, seconds in times.items():
        ranked = sorted(seconds)
        p90 = ranked[int(0.9 * (len(ranked) - 1))]
        print(f"{kind:10} median {statistics.median(ranked):.3f} s, p90 {p90:.3f} s")


if __name__ == "__main__":
    main()
