"""The wish to stop a fine-tuning, which comes as a signal, and how much time it leaves."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from headrace.errors import Interrupted
from headrace.services.operate.serve.stopper import DRAIN_S
from headrace.trainer.loop import FINISH_S, STOP_S


@dataclass
class SftStop:
    """The signals of one fine-tuning. Its thread reads it."""

    stopping: threading.Event = field(default_factory=threading.Event)
    """The next update must not begin."""
    cut: threading.Event = field(default_factory=threading.Event)
    """The update that is under way must be dropped."""
    save_by: float = math.inf
    """When the last checkpoint must be written, in monotonic seconds."""


@asynccontextmanager
async def stop_on_signals(
    say: Callable[[str], None], clean: Callable[[], None]
) -> AsyncIterator[SftStop]:
    """Lets SIGINT and SIGTERM stop a fine-tuning while the block runs.

    The update that is under way has FINISH_S. After SIGINT, a person waits: the checkpoint may take
    as long as it takes, and a second SIGINT ends the process at once. SIGTERM comes from a program
    that may kill this process soon: the checkpoint has to be written after STOP_S, and the process
    ends by force after DRAIN_S. `clean` removes before that
    what the process would leave.
    """
    stop = SftStop()
    loop = asyncio.get_running_loop()
    timers: list[threading.Timer] = []

    def end() -> None:
        clean()
        os._exit(Interrupted.exit_code)

    def on_signal(number: signal.Signals) -> None:
        again = stop.stopping.is_set()
        if again and number == signal.SIGINT:
            end()
        if number == signal.SIGTERM and not timers:
            stop.save_by = time.monotonic() + STOP_S
            # The timer is a thread because the event loop may be what hangs.
            timers.append(threading.Timer(DRAIN_S, end))
            timers[0].daemon = True
            timers[0].start()
        if not again:
            hint = "; Ctrl-C again ends without it" if number == signal.SIGINT else ""
            say(f"stopping: this update is finished first, and a checkpoint is written{hint}")
            stop.stopping.set()
            loop.call_later(FINISH_S, stop.cut.set)

    signals = (signal.SIGINT, signal.SIGTERM)
    for one in signals:
        loop.add_signal_handler(one, on_signal, one)
    try:
        yield stop
    finally:
        for timer in timers:
            timer.cancel()
        for one in signals:
            loop.remove_signal_handler(one)
