from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.services.operate.serve import loop_watch
from headrace.services.operate.serve.loop_watch import LoopWatch


class MyEnv:
    async def step(self, blocks_s: float) -> None:
        time.sleep(blocks_s)


@pytest.mark.parametrize("blocks", [True, False])
def test_who_blocks_the_loop_is_named_once(
    blocks: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watch, "LIMIT_S", 0.2)
    monkeypatch.setattr(loop_watch, "SAMPLE_S", 0.02)

    async def main() -> None:
        with closing(LoopWatch()):
            if blocks:
                await asyncio.create_task(MyEnv().step(1.0))
            await asyncio.sleep(0.5)

    caplog.set_level(logging.WARNING)
    asyncio.run(main())
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == blocks
    if blocks:
        assert said[0].startswith("MyEnv.step (")
        assert "test_loop_watch.py:" in said[0]


def test_who_blocks_is_named_even_if_the_loop_was_late_before(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watch, "LIMIT_S", 0.2)
    monkeypatch.setattr(loop_watch, "SAMPLE_S", 0.02)

    async def main() -> None:
        with closing(LoopWatch()):
            await asyncio.sleep(0.1)
            asyncio.get_running_loop().call_soon(time.sleep, 0.3)
            await asyncio.create_task(MyEnv().step(1.0))

    caplog.set_level(logging.WARNING)
    asyncio.run(main())
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("MyEnv.step (")


def test_the_watch_ends_even_if_the_loop_stays_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "LIMIT_S", 0.1)
    monkeypatch.setattr(loop_watch, "SAMPLE_S", 0.02)

    class Blocking:
        async def step(self) -> list[str]:
            watch = LoopWatch()
            time.sleep(0.5)
            watch.close()
            time.sleep(0.5)
            return [thread.name for thread in threading.enumerate()]

    assert "loop-watch" not in asyncio.run(Blocking().step())


def test_what_is_ours_is_not_blamed_on_users() -> None:
    def frame(module: str) -> Any:
        return SimpleNamespace(f_globals={"__name__": module})

    assert loop_watch._known(frame("headrace.services.worker.worker"))
    assert loop_watch._known(frame("asyncio.events"))
    assert not loop_watch._known(frame("my_envs"))
