"""A library's child process, seen from its worker.

The process is started when it is needed, gets one request at a time, and is killed if it hangs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from headrace.errors import EnvironmentFailed, InfrastructureError, UsageError
from headrace.services.env.libraries import libraries_child as child
from headrace.services.processes.child_process import ChildProcess, LineTooLong

logger = logging.getLogger(__name__)

MAKE_S = 120.0
"""Seconds that the import of a library may take."""
GRACE_S = 5.0
"""Seconds after a call's own limit when the child is killed."""


class LibraryProcess:
    """At most one child process. After its death, the next call starts another."""

    def __init__(
        self, target: str, options: Mapping[str, Any], call_s: float, memory_mb: int, most: int
    ) -> None:
        """`target` names a Library for `plugins.load`. An answer has at most `most` bytes."""
        self._setup = {
            "target": target,
            "options": dict(options),
            "make_s": MAKE_S,
            "call_s": call_s,
            "memory_mb": memory_mb,
        }
        self._call_s = call_s
        self._most = most
        self._process: ChildProcess | None = None
        self._turn = asyncio.Lock()
        self.born = 0
        """Children started so far. An episode lives in one of them."""

    async def ask(self, verb: str, born: int | None, **call: Any) -> Mapping[str, Any]:
        """Call the library and return its answer.

        `born` says which child has the episode; None takes any. Raises InfrastructureError
        `sandbox_lost` if that child is gone, EnvironmentFailed if the library fails or hangs, and
        UsageError if it can't be made.
        """
        async with self._turn:
            if born is not None and (self._process is None or born != self.born):
                raise InfrastructureError("sandbox_lost", "the library's process was ended")
            finished = False
            try:
                if self._process is None:
                    await self._start()
                answer = await self._exchange({"verb": verb, **call}, self._call_s)
                finished = True
            finally:
                # If this call was cancelled, the child would send its answer to the next call.
                if not finished:
                    await self.kill()
        return _said(answer)

    async def kill(self) -> None:
        """End the child, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            await process.aclose()

    async def _start(self) -> None:
        self.born += 1
        self._process = await ChildProcess.start(
            (sys.executable, "-m", child.__name__),
            {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            limit=self._most,
        )
        _said(await self._exchange(self._setup, MAKE_S))

    async def _exchange(self, request: Mapping[str, Any], limit_s: float) -> Mapping[str, Any]:
        assert self._process is not None
        try:
            async with asyncio.timeout(limit_s + GRACE_S):
                self._process.send(json.dumps(request).encode())
                message = await self._process.receive()
        except TimeoutError as error:
            said = (
                f"the library did not answer within {limit_s + GRACE_S:g} s; its process was killed"
            )
            raise EnvironmentFailed("too_slow", said) from error
        except LineTooLong as error:
            said = f"the library answered with more than {self._most // 1024} KiB; raise answer_kb"
            raise EnvironmentFailed("answer_too_large", said) from error
        if message is None:
            end = await self._process.describe_end()
            raise EnvironmentFailed("library_died", f"its process ended in this call: {end}")
        answer: Mapping[str, Any] = json.loads(message)
        return answer


def _said(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the library's answer, or raise its error."""
    if "error" not in answer:
        said: Mapping[str, Any] = answer["answer"]
        return said
    kind, message = answer["kind"], answer["error"]
    if kind == "usage":
        raise UsageError(message)
    code = "too_slow" if kind == "too_slow" else "library_failed"
    raise EnvironmentFailed(code, f"{kind}: {message}")
