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
        self._target = target
        self._setup = {
            "options": dict(options),
            "make_s": MAKE_S,
            "call_s": call_s,
            "memory_mb": memory_mb,
        }
        self._call_s = call_s
        self._most = most
        self._process: asyncio.subprocess.Process | None = None
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
            if process.returncode is None:
                process.kill()
            assert process.stdout is not None
            while await process.stdout.read(1 << 16):  # unread output keeps its pipe open
                pass
            await process.wait()

    async def _start(self) -> None:
        self.born += 1
        self._process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "headrace.services.env.libraries.library_child",
                str(os.getpid()),
                self._target,
            ),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=self._most,
            env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        )
        _said(await self._exchange(self._setup, MAKE_S))

    async def _exchange(self, request: Mapping[str, Any], limit_s: float) -> Mapping[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(limit_s + GRACE_S):
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            said = (
                f"the library did not answer within {limit_s + GRACE_S:g} s; its process was killed"
            )
            raise EnvironmentFailed("too_slow", said) from error
        except ValueError as error:
            said = f"the library answered with more than {self._most // 1024} KiB; raise answer_kb"
            raise EnvironmentFailed("answer_too_large", said) from error
        except OSError as error:
            raise EnvironmentFailed("library_died", f"its process is gone: {error}") from error
        if not line.endswith(b"\n"):
            code = await self._process.wait()
            raise EnvironmentFailed("library_died", f"its process ended with {code} in this call")
        answer: Mapping[str, Any] = json.loads(line)
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
