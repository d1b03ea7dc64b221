"""When a busy server of environments is asked again."""

from __future__ import annotations

import asyncio

import pytest

from headrace.services.env.http_environment import Busy, Room


def test_pauses_grow_while_a_server_stays_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def call() -> str:
        if len(slept) < 12:
            raise Busy("full")
        return "room"

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        assert asyncio.run(Room(60.0).until_free(call)) == "room"
    for number, pause_s in enumerate(slept):
        most_s = min(0.1 * 2**number, 8.0)
        assert most_s / 2 <= pause_s <= most_s
