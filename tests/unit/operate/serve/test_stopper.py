"""What signals do to a service's process."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Iterator

import pytest

from headrace.services.operate.serve import stopper as module
from headrace.services.operate.serve.stopper import Stopper

Signals = list[tuple[bool, bool]]
"""After each signal: whether the service is to drain, and whether it is to stop."""


@pytest.fixture(autouse=True)
def _nobody_exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_exit_by_force", lambda: None)
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)
    gc.unfreeze()
    gc.enable()


def after(*signals: signal.Signals, drain_s: float | None, drain: bool = False) -> Signals:
    async def main() -> Signals:
        stopping, draining = asyncio.Event(), asyncio.Event()
        Stopper(stopping, draining, drain_s).stop_on_signals(drain=drain)
        found = []
        for number in signals:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.01)
            found.append((draining.is_set(), stopping.is_set()))
        return found

    return asyncio.run(main())


def test_sigusr1_drains_and_sigterm_stops() -> None:
    signals = (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM)
    assert after(*signals, drain_s=60.0) == [(True, False), (True, False), (True, True)]


def test_the_first_sigterm_drains_if_it_shall_and_the_second_one_stops() -> None:
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM)
    found = after(*signals, drain_s=60.0, drain=True)
    assert found == [(True, False), (True, False), (True, True)]


def test_a_drain_takes_bounded_time() -> None:
    async def main() -> float:
        stopping, draining = asyncio.Event(), asyncio.Event()
        Stopper(stopping, draining, 0.1).stop_on_signals()
        begun_s = asyncio.get_running_loop().time()
        os.kill(os.getpid(), signal.SIGUSR1)
        async with asyncio.timeout(60):
            await stopping.wait()
        assert draining.is_set()
        return asyncio.get_running_loop().time() - begun_s

    assert asyncio.run(main()) > 0.09


def test_a_service_that_can_not_drain_stops() -> None:
    assert after(signal.SIGUSR1, drain_s=None) == [(False, True)]


def test_the_collector_does_not_visit_what_a_stopped_service_has() -> None:
    """With 100,000 live episodes that took an env worker 5 s, after it had released them."""
    before = gc.get_freeze_count()
    after(signal.SIGTERM, drain_s=None)
    assert not gc.isenabled()
    assert gc.get_freeze_count() > before + 1_000


def test_a_late_signal_does_not_kill_a_process_that_ends() -> None:
    after(drain_s=60.0)
    os.kill(os.getpid(), signal.SIGUSR1)
