"""An engine that takes a moment for each call, and records all calls of all processes in a file."""

from __future__ import annotations

import asyncio
import itertools
import os
import time

from headrace.services.inference.engine import EngineOutput, EnginePrompt, EngineSetup
from headrace.services.inference.engines.scripted import ScriptedEngine


class RecordingEngine(ScriptedEngine):
    """Writes a line for the beginning and for the end of a call, with the clock of the machine.

    Options, beside those of ScriptedEngine: `file` to append to, and `call_s`.
    """

    def __init__(self, setup: EngineSetup) -> None:
        options = dict(setup.options)
        path, self._call_s = str(options.pop("file")), float(options.pop("call_s"))
        fields = {name: getattr(setup, name) for name in EngineSetup.__slots__}
        super().__init__(EngineSetup(**{**fields, "options": options}))
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._numbers = itertools.count()

    async def generate(self, prompt: EnginePrompt) -> EngineOutput:
        number = next(self._numbers)
        self._write("begun", number)
        try:
            await asyncio.sleep(self._call_s)
            return await super().generate(prompt)
        except asyncio.CancelledError:
            self._write("cancelled", number)
            raise
        finally:
            self._write("ended", number)

    def _write(self, what: str, number: int) -> None:
        line = f"{what} {os.getpid()} {number} {time.monotonic()}\n"
        os.write(self._file, line.encode())
