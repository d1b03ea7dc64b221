"""What the dashboard changes if somebody asks for it. It calls what the commands call.

`evaluate` and `replay` take minutes and processes of their own, so they run as commands. They are
children of the dashboard and end with it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.events import TaskSubmitted
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import TASKS
from headrace.services.base.clock import now
from headrace.services.base.texts import encodable
from headrace.services.kafka.broker import Position
from headrace.services.log.log_reader import Patience
from headrace.services.namespace.cluster_config import ClusterConfig, write_resolved
from headrace.services.namespace.connect import Connection
from headrace.services.operate.dashboard.views.cut_texts import Tree, text_tree
from headrace.services.operate.dashboard.views.fact_reader import FactReader
from headrace.services.operate.dashboard_child import variables_of
from headrace.services.operate.dead_letters.dead_letters import redrive
from headrace.services.operate.processes import headrace_command
from headrace.services.processes.signals import send_signal
from headrace.services.tasks.cancellation import find_tasks, send_cancellations

ACTIONS = ("cancel", "again", "redrive", "evaluate", "replay")
"""The actions that a page offers. `stop` ends a command that one of them has started."""
SOURCE = "dashboard"
"""The source of the tasks that are submitted again."""
MOST_JOBS = 20
"""Jobs that are listed. At most one runs at a time: each uses whole processors."""
OUTPUT = 20_000
"""Characters of a job's output that are kept, the last ones."""
END_S = 5.0
"""Seconds after SIGTERM until a job is killed."""
MOST_NUMBERS = 1_000
REQUEST = re.compile(r"[0-9a-f]{8,64}")


@dataclass
class Job:
    """A command that was started."""

    number: str
    command: tuple[str, ...]
    process: asyncio.subprocess.Process
    began_at: float
    ended_at: float | None = None
    output: deque[str] = field(default_factory=deque)
    reader: asyncio.Task[None] | None = None

    def to_tree(self) -> Tree:
        """Returns it as JSON values."""
        code = self.process.returncode
        return {
            "job": self.number,
            "command": " ".join(("headrace", *self.command)),
            "state": "running" if code is None else "done" if code == 0 else "failed",
            "began_at": self.began_at,
            "ended_at": self.ended_at,
            "output": text_tree("".join(self.output)[-OUTPUT:]),
        }


class DashboardActions:
    """The actions on one run."""

    def __init__(
        self, connection: Connection, cluster: ClusterConfig, recipe: Recipe, reader: FactReader
    ) -> None:
        self._connection = connection
        self._cluster = cluster
        self._recipe = recipe
        self._reader = reader
        self._jobs: deque[Job] = deque(maxlen=MOST_JOBS)
        self._numbers = count(1)
        self._starting = asyncio.Lock()

    async def run(self, action: str, body: Mapping[str, Any]) -> Tree:
        """Does what a request asks for. Raises UsageError if that is not possible."""
        match action:
            case "cancel":
                return await self._cancel(_whole(body, "task"), _text(body, "reason"))
            case "again":
                return await self._again(_whole(body, "task"), _text(body, "request"))
            case "redrive":
                return await self._redrive(body.get("numbers"))
            case "evaluate" | "replay":
                async with self._starting:
                    return await self._start(action, _text(body, "policy"), _whole(body, "version"))
            case "stop":
                return await self._stop(_text(body, "job"))
        raise UsageError(f"there is no action {action[:40]!r}: choose from {', '.join(ACTIONS)}")

    def jobs_tree(self) -> Tree:
        """Returns the jobs, the newest first."""
        items = [job.to_tree() for job in reversed(self._jobs)]
        return {"items": items, "total": len(items), "next": None}

    async def aclose(self) -> None:
        """Ends all jobs."""
        await asyncio.gather(*(_end(job) for job in self._jobs))

    async def _cancel(self, task: int, reason: str) -> Tree:
        log = await self._connection.writing_log(self._reader.log.topics)
        statuses = await find_tasks(log, [str(task)], None, all_queued=False)
        await send_cancellations(log, statuses, reason or "cancelled in the dashboard")
        (status,) = statuses
        message = f"cancelled while {status.state}"
        if status.state in ("ended", "refused"):
            message = "had already ended, or was refused: nothing changes"
        return {"ok": True, "message": f"task {task}: {message}"}

    async def _again(self, task: int, request: str) -> Tree:
        """Submits a copy of a task. `request` is the page's own id of what was asked for: if a
        browser or a person repeats it, the scheduler refuses the second copy as a repetition."""
        if request and not REQUEST.fullmatch(request):
            raise UsageError("request: give 8 to 64 hexadecimal digits, or leave it out")
        position = Position(self._reader.log.topics.partition(TASKS), task)
        found = await self._reader.delivery(position)
        if found is None or not isinstance(found.event, TaskSubmitted):
            raise UsageError(f"the log no longer holds the submission of task {task}")
        # This dashboard signs the copy, so it must not prove what nobody has signed.
        if why := found.refusal(self._recipe.scheduler.trusted, found.event.tenant):
            raise UsageError(f"task {task} was refused, so it is not submitted again: {why}")
        task_id = f"{task}-again-{request or uuid.uuid4().hex}"
        changed = {"source": SOURCE, "task_id": task_id}
        log = await self._connection.writing_log(self._reader.log.topics)
        ref = await log.send(found.event.model_copy(update=changed))
        message = f"task {task} was submitted again as task {ref.offset}"
        return {"ok": True, "message": message, "task": ref.offset}

    async def _redrive(self, numbers: object) -> Tree:
        if (
            not isinstance(numbers, list)
            or not 0 < len(numbers) <= MOST_NUMBERS
            or not all(isinstance(one, int) and 0 <= one < 2**53 for one in numbers)
        ):
            raise UsageError(f"numbers: give 1 to {MOST_NUMBERS} numbers of dead letters")
        log = await self._connection.writing_log(self._reader.log.topics)
        results = [
            {"number": letter.number, "refused": refused}
            async for letter, refused in redrive(log, numbers, Patience(lambda line: None))
        ]
        return {"ok": True, "results": results}

    async def _start(self, action: str, policy: str, version: int) -> Tree:
        running = [job for job in self._jobs if job.process.returncode is None]
        if running:
            raise UsageError(f"job {running[0].number} still runs: wait for it, or stop it")
        if policy not in self._recipe.policies:
            raise UsageError(f"there is no policy {policy[:80]!r}")
        command: Sequence[str] = ("replay", "batches", "--policy", policy, "--until", str(version))
        if action == "evaluate":
            if len(self._recipe.policies) > 1:
                raise UsageError(
                    "`headrace evaluate` plays all policies of a run at one version, and this run "
                    "has several: call it with the version that you want"
                )
            path = await asyncio.to_thread(write_resolved, self._recipe, self._cluster.state)
            command = ("evaluate", str(Path(path).absolute()), "--version", str(version))
        job = await self._spawn(tuple(command))
        return {"ok": True, "job": job.number, "message": job.to_tree()["command"]}

    async def _spawn(self, command: tuple[str, ...]) -> Job:
        process = await asyncio.create_subprocess_exec(
            *headrace_command(*command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **variables_of(self._cluster)},
            start_new_session=True,
        )
        job = Job(str(next(self._numbers)), command, process, now())
        job.reader = asyncio.create_task(_read(job))
        self._jobs.append(job)
        return job

    async def _stop(self, number: str) -> Tree:
        job = next((one for one in self._jobs if one.number == number), None)
        if job is None:
            raise UsageError(f"there is no job {number[:40]!r}")
        await _end(job)
        return {"ok": True, "message": f"job {number} has ended"}


async def _read(job: Job) -> None:
    """Keeps the last output of a job, until it ends."""
    assert job.process.stdout is not None
    size = 0
    while data := await job.process.stdout.read(4_096):
        text = encodable(data.decode(errors="replace"))
        job.output.append(text)
        size += len(text)
        while size > 2 * OUTPUT:
            size -= len(job.output.popleft())
    await job.process.wait()
    job.ended_at = now()


async def _end(job: Job) -> None:
    """Ends a job and its own children, at the latest after END_S."""
    if job.process.returncode is None:
        send_signal(job.process, signal.SIGTERM)
        try:
            await asyncio.wait_for(job.process.wait(), END_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(job.process.pid, signal.SIGKILL)
    if job.reader is not None:
        await asyncio.wait({job.reader}, timeout=1.0)
        job.reader.cancel()


def _whole(body: Mapping[str, Any], name: str) -> int:
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise UsageError(f"{name}: give a whole number")
    return value


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name, "")
    if not isinstance(value, str) or len(value) > 1_000:
        raise UsageError(f"{name}: give a text of at most 1,000 characters")
    return value
