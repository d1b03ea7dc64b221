"""What a worker records about its life, and when."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from headrace.errors import DependencyError, HeadraceError
from headrace.schemas.events import Event, InstanceStateEntered
from headrace.services.worker.life_records import LifeRecords, next_record_s
from tests.simulation.virtual_time import VirtualTimeLoop

WEEK_S = 7 * 86_400.0


def live(
    seconds: float, ready_s: float, error: Exception | None = None, broken: bool = False
) -> list[tuple[float, InstanceStateEntered]]:
    """What a worker records in a life of so many seconds, each with when."""
    loop = VirtualTimeLoop(0)
    sent: list[tuple[float, InstanceStateEntered]] = []

    async def send(event: Event) -> None:
        assert isinstance(event, InstanceStateEntered)
        if broken:
            raise DependencyError("the broker is away")
        sent.append((loop.wall_time() - began_s, event))

    async def main() -> None:
        ready = asyncio.Event()
        loop.call_later(ready_s, ready.set)
        async with LifeRecords(send, "env-host-7", "env", "", began_s, ready).recording():
            await asyncio.sleep(seconds)
            if error is not None:
                raise error

    began_s = loop.wall_time()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    return sent


def test_a_life_is_recorded_from_its_begin_to_its_end() -> None:
    sent = live(100.0, ready_s=30.0)
    assert [(round(at), event.state) for at, event in sent] == [
        (0, "provisioning"),
        (30, "ready"),
        (90, "ready"),
        (100, "gone"),
    ]
    assert [event.every_ms for _, event in sent] == [60_000, 60_000, 60_000, 0]
    assert [event.number for _, event in sent] == [0, 1, 2, 3]
    assert {event.began_at for _, event in sent} == {sent[0][1].began_at}
    assert {event.service for _, event in sent} == {"env"}


def test_a_failure_is_recorded_with_its_reason() -> None:
    sent: list[InstanceStateEntered] = []

    async def send(event: Event) -> None:
        assert isinstance(event, InstanceStateEntered)
        sent.append(event)

    async def main() -> None:
        ready = asyncio.Event()
        async with LifeRecords(send, "w", "agent", "", 0.0, ready).recording():
            raise HeadraceError("no disk")

    with pytest.raises(HeadraceError):
        asyncio.run(main())
    assert (sent[-1].state, sent[-1].reason) == ("failed", "no disk")


def test_a_worker_lives_on_if_its_life_can_not_be_recorded() -> None:
    assert live(200.0, ready_s=0.0, broken=True) == []


def test_a_week_takes_few_records_and_leaves_little_unsure() -> None:
    sent = live(WEEK_S, ready_s=60.0)
    assert len(sent) < 260
    for (at, event), (later, _) in pairwise(sent):
        assert later - at <= event.every_ms / 1000 + 0.01
        assert event.every_ms / 1000 <= max(60.0, 0.05 * at + 1)
    assert next_record_s(1e9) == 3600.0
