"""An environment that changes a file of its task, and one that kills its worker over it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from headrace.schemas.untrusted.artifact_names import matches
from headrace.services.base.types import Observation, TaskView


class Editor:
    """Each action adds a line to the file `in/text`, which comes out as `out/text`.

    If the file says `deadly`, its worker is killed in the middle of the first collect.
    """

    takes_files = True
    replayable = True

    def __init__(self, marker: str, lines: int = 1) -> None:
        self._marker = Path(marker)
        self._lines = lines

    async def reset(self, task: TaskView) -> Observation:
        self._text = (await task.artifacts["in/text"].read()).decode()
        self._left = self._lines
        return Observation(text="go", artifacts={"log": f"sample {task.sample}".encode()})

    async def step(self, action: str) -> Observation:
        self._text += f"line {self._lines - self._left}\n"
        self._left -= 1
        return Observation(text="next", reward=1.0, terminated=not self._left)

    async def collect(self, patterns: Sequence[str]) -> Observation:
        if self._text.startswith("deadly") and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        files = {"out/text": self._text.encode(), "private": b"not asked for"}
        chosen = {name: data for name, data in files.items() if matches(name, patterns)}
        return Observation(artifacts=chosen)

    async def aclose(self) -> None:
        """Nothing to give back."""
