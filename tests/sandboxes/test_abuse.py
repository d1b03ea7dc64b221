"""What an unfriendly policy may try: nothing gets out, and nobody outside is harmed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.errors import InfrastructureError
from tests.sandboxes.bench import Bench, bench, claim, view
from tests.sandboxes.probes import PROBES

AT_ONCE = 4
ALIVE_S = 60.0
"""Most seconds until a sandbox that has not ended runs a command again."""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.services.env.sandbox.sandbox.KILL_S", 10.0)


async def attack(made: Bench, number: int, command: str) -> str:
    """What the probe said, in a sandbox of its own; and that it can be taken away."""
    environment = await made.take(claim(number))
    await environment.reset(view())
    try:
        said = await environment.step(command)
        ended = said.truncated
        async with asyncio.timeout(ALIVE_S):
            while not ended:  # on a busy machine, a command may take longer than its limit
                after = await environment.step("echo alive")
                ended = after.truncated or "alive" in after.text
        return said.text
    finally:
        await environment.aclose()


async def attack_all(engine: str, probes: list[tuple[str, str]]) -> None:
    """Runs probes, a few at once, and looks for the harm that they did."""
    escaped: list[str] = []
    room = asyncio.Semaphore(AT_ONCE)
    async with bench(engine, command_s=5, flood_kb=2048) as made:

        async def one(number: int, name: str, command: str) -> None:
            async with room:
                try:
                    said = await attack(made, number, command)
                except InfrastructureError as error:
                    escaped.append(f"{name}: blamed on the infrastructure: {error}")
                    return
                except TimeoutError:
                    escaped.append(f"{name}: no command works any more")
                    return
            assert len(said.encode()) < 40 * 1024
            if "ESCAPED" in said:
                escaped.append(f"{name}: {said[-500:]}")

        await asyncio.gather(*(one(at, *probe) for at, probe in enumerate(probes)))
        assert escaped == []
        assert await made.left() == []
        well = await made.fresh(claim(100_000))
        assert (await well.step("echo well")).text == "well\n"


def test_no_probe_escapes(engine: str) -> None:
    assert len(PROBES) >= 40
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    asyncio.run(asyncio.wait_for(attack_all(engine, list(PROBES.items())), 300))
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before
    assert not Path("/escaped").exists()


@pytest.mark.long
def test_two_hundred_probes(engine: str) -> None:
    rounds = [(f"{name} ({turn})", text) for turn in range(4) for name, text in PROBES.items()]
    assert len(rounds) >= 200
    asyncio.run(asyncio.wait_for(attack_all(engine, rounds), 1800))
