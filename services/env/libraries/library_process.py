"""A library's child process, as its worker sees it: started when it is needed, asked one thing at a
time, and killed where it hangs."""

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
"""Seconds that a library has to be imported."""
GRACE_S = 5.0
"""Seconds beyond a call's own limit, after which the child itself is given up."""


class LibraryProcess:
    """One child, or none. After its death the next call starts another."""

    def __init__(
        self, target: str, options: Mapping[str, Any], call_s: float, memory_mb: int, most: int
    ) -> None:
        """`target` names a Library for `plugins.load`; `most` are the bytes of one answer."""
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
        """How many children there have been: an episode lives in one of them."""

    async def ask(self, verb: str, born: int | None, **call: Any) -> Mapping[str, Any]:
        """A call's answer.

        `born` says which child has the episode; None takes any. InfrastructureError `sandbox_lost`
        where that is gone, EnvironmentFailed where the library fails or hangs, UsageError where it
        can't be made.
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
                # Given up in the middle, it would answer the next one what this one asked.
                if not finished:
                    await self.kill()
        return _said(answer)

    async def kill(self) -> None:
        """Ends the child, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            assert process.stdout is not None
            while await process.stdout.read(1 << 16):  # what is left keeps its pipe open
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
            said = f"the library did not come back in {limit_s + GRACE_S:g} s: its process is ended"
            raise EnvironmentFailed("too_slow", said) from error
        except ValueError as error:
            said = f"the library answers with more than {self._most // 1024} KiB"
            raise EnvironmentFailed("answer_too_large", said) from error
        except OSError as error:
            raise EnvironmentFailed("library_died", f"its process is gone: {error}") from error
        if not line.endswith(b"\n"):
            code = await self._process.wait()
            raise EnvironmentFailed("library_died", f"its process ended with {code} in this call")
        answer: Mapping[str, Any] = json.loads(line)
        return answer


def _said(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the library answers, or its error."""
    if "error" not in answer:
        said: Mapping[str, Any] = answer["answer"]
        return said
    kind, message = answer["kind"], answer["error"]
    if kind == "usage":
        raise UsageError(message)
    code = "too_slow" if kind == "too_slow" else "library_failed"
    raise EnvironmentFailed(code, f"{kind}: {message}")
