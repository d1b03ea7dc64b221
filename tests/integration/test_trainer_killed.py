"""The trainer dies at each step of storing, publishing and saving a version, and is started again.

A fresh interpreter imports torch once and forks a child for each death, with a log in memory that
outlives it: what a child had committed, it had reported to its parent. It dies before its first
write to the disk, its second, …, and amid large ones, where the kernel kills it at a file's size.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.codec import Codec
from headrace.schemas.events import EVENTS, PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import POLICIES, Topics
from headrace.services.kafka.broker import FencedWriter, Outgoing, Position
from tests.integration.test_trainer import RECIPE, Bench
from tests.memory.memory_broker import MemoryBroker

BOUND_S = 500
DIED = 137
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
"""Audit events that change a disk, beside opening to write."""
STORED, SAVED = 463_200, 1_390_000
"""Bytes of the weights' blob, and about those of the learner's state: where sizes kill."""

Line = tuple[str, bytes, bytes]
"""Topic, key, value."""


def recipe() -> Recipe:
    tree = RECIPE.model_dump(mode="json")
    # A critic is the most that a checkpoint can have.
    changes = {"checkpoint_every": 1, "keep_checkpoints": 2, "critic": {"warmup_updates": 1}}
    tree["policies"]["learner"]["training"] |= changes
    tree["policies"]["learner"]["groups"] = {"advantage": "rewards"}
    return Recipe.model_validate(tree)


class Reporter(MemoryBroker):
    """Reports every record that is committed, before its writer knows; `step` runs around it."""

    def __init__(self, tell: Callable[[Outgoing], None], step: Callable[[], None]) -> None:
        super().__init__()
        self.tell = tell
        self.step = step

    async def send(self, record: Outgoing) -> Position:
        position = await super().send(record)
        self.tell(record)
        return position

    async def fenced(self, writer: str) -> FencedWriter:
        inner, broker = await super().fenced(writer), self

        class Writer:
            async def write(self, records: Sequence[Outgoing], *rest: Any) -> list[Position]:
                broker.step()
                positions = await inner.write(records, *rest)
                for record in records:
                    broker.tell(record)
                broker.step()
                return positions

            async def close(self) -> None:
                await inner.close()

        return Writer()


class Steps:
    """Counts what changes the disk under a folder, and dies before step number `last`."""

    def __init__(self, folder: Path, last: int) -> None:
        self._folder = str(folder)
        self._last = last
        self._seen = 0
        self._sync = os.fsync
        if last:
            sys.addaudithook(self._on_event)
            os.fsync = self._on_sync  # type: ignore[assignment]

    def step(self) -> None:
        self._seen += 1
        if self._seen == self._last:
            os._exit(DIED)

    def _on_sync(self, descriptor: int) -> None:
        self.step()
        self._sync(descriptor)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        opened = event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if (opened or event in CHANGES) and self._folder in str(arguments[0]):
            self.step()


def in_child(
    folder: Path, log: list[Line], work: Callable[[Bench], Any], die_at: int = 0, size: int = 0
) -> int:
    """Does work on a bench that holds `log`, in a fork; what it commits is added. Its exit code."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        code = 1
        try:
            asyncio.run(asyncio.wait_for(_child(folder, log, work, writing, die_at, size), 60))
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as reports:
        for line in reports:
            topic, key, value = line.rstrip("\n").split(" ")
            log.append((topic, bytes.fromhex(key), bytes.fromhex(value)))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def _child(
    folder: Path,
    log: Sequence[Line],
    work: Callable[[Bench], Any],
    pipe: int,
    die_at: int,
    size: int,
) -> None:
    def tell(record: Outgoing) -> None:
        line = f"{record.topic} {record.key.hex()} {record.value.hex()}\n".encode()
        while line:
            line = line[os.write(pipe, line) :]

    broker = Reporter(lambda _: None, lambda: None)
    bench = Bench(broker, folder, recipe=recipe())
    await bench.make_topics()
    for topic, key, value in log:
        await broker.send(Outgoing(topic, key, value))
    broker.tell, broker.step = tell, Steps(folder, die_at).step
    if size:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    await work(bench)


def submitting(*versions: int) -> Callable[[Bench], Coroutine[Any, Any, None]]:
    async def submit(bench: Bench) -> None:
        for version in versions:
            await bench.submit(version, samples=2)

    return submit


def published(log: Sequence[Line]) -> list[tuple[int, str, bytes]]:
    """Version, status and digest of each publication."""
    codec = Codec()
    for schema_id, event_type in enumerate(EVENTS, 1):
        codec.register(event_type, schema_id)
    name = Topics("test", list(RECIPE.policies), 2).name(POLICIES)
    events = [codec.decode(PolicyPublished, value) for topic, _, value in log if topic == name]
    return [(one.version, one.status, one.digest) for one in events]


def main(root: Path, every: int) -> None:
    """Kills at the first step and each `every`-th one after it; prints how often it died."""
    log: list[Line] = []
    assert in_child(root / "base", log, submitting(1, 2)) == 0
    straight = list(log)
    assert in_child(root / "straight", straight, submitting(3, 4)) == 0
    assert in_child(root / "straight", straight, lambda bench: bench.train(4)) == 0
    expected = published(straight)
    assert [version for version, _, _ in expected] == [0, 1, 2, 3, 4]
    assert in_child(root / "base", log, lambda bench: bench.train(2)) == 0
    assert published(log) == expected[:3]
    assert in_child(root / "base", log, submitting(3, 4)) == 0

    died = 0
    while _die(root, log, expected, die_at=1 + died * every):
        died += 1
    sizes = (1, STORED // 2, STORED - 1, STORED + 1, SAVED // 2, SAVED - 1)
    killed = [_die(root, log, expected, size=size) for size in sizes]
    assert all(killed), killed
    print(died)


def _die(
    root: Path,
    log: list[Line],
    expected: Sequence[tuple[int, str, bytes]],
    die_at: int = 0,
    size: int = 0,
) -> bool:
    """Makes version 3, and dies amid it; another process goes on. True where it died."""
    folder, mine = root / f"{die_at}-{size}", list(log)
    shutil.copytree(root / "base", folder)
    code = in_child(folder, mine, lambda bench: bench.train(3), die_at, size)
    assert code in (0, DIED, -signal.SIGXFSZ), code
    assert in_child(folder, mine, lambda bench: bench.train(4)) == 0
    assert published(mine) == expected, f"after a death at step {die_at}, or at {size} bytes"
    kept = sorted(path.name for path in (folder / "test" / "checkpoints" / "learner").iterdir())
    assert kept[1:] == ["v000000000004"], f"two, and nothing of the dead: {kept}"
    shutil.rmtree(folder)
    return code != 0


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_killed_at_any_step_the_next_one_makes_the_same_weights(tmp_path: Path, every: int) -> None:
    module = "tests.integration.test_trainer_killed"
    done = subprocess.run(
        [sys.executable, "-m", module, str(tmp_path), str(every)],
        capture_output=True,
        text=True,
        check=False,
        timeout=BOUND_S,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 18 // every, "steps at which it died"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
