"""What a policy leaves running never becomes a retry, and never changes a grade."""

from __future__ import annotations

import asyncio

import pytest

from tests.sandboxes.bench import bench, view
from tests.sandboxes.survivors import SURVIVORS


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.services.env.sandbox.sandbox.KILL_S", 5.0)


@pytest.mark.parametrize("name", SURVIVORS)
def test_a_survivor_gives_an_observation_and_never_a_retry(engine: str, name: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), bench(engine, command_s=5) as made:
            environment = await made.take()
            await environment.reset(view())
            said = await environment.step(SURVIVORS[name])
            for number in range(3):
                if said.truncated:
                    break
                said = await environment.step(f"echo {number} alive")
                assert said.truncated or f"{number} alive" in said.text, said
            await environment.aclose()
            assert await made.left() == []

    asyncio.run(main())
