"""A library that does what a policy says."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

from headrace.errors import UsageError


class Odd:
    """A library that does what a policy says."""

    def __init__(self, broken: bool = False) -> None:
        if broken:
            raise UsageError("broken is no good")

    def reset(self, name: str, task: Mapping[str, Any]) -> Mapping[str, Any]:
        print("this is no answer")
        return {"text": "ready"}

    def step(self, name: str, action: str) -> Mapping[str, Any]:
        if action == "sleep":
            time.sleep(600)
        if action == "hang":  # in C, where no signal gets through
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            time.sleep(600)
        if action == "die":
            os._exit(3)
        if action == "eat":
            return {"text": str(len(bytearray(8 << 30)))}
        if action == "flood":
            return {"text": "x" * (1 << 20)}
        if action == "fail":
            raise ZeroDivisionError("by zero")
        return {"text": action, "reward": 1.0}

    def close(self, name: str) -> None:
        pass
