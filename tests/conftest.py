"""What any test may ask for: a real broker and registry, one a session, and a fresh namespace."""

from __future__ import annotations

import gc
import os
import uuid
from asyncio.base_subprocess import BaseSubprocessTransport
from collections.abc import Generator, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from headrace.infra import local

# By default each of several processes has a torch thread for each core. They would wait for each
# other in busy loops: a test took seven times the processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _name_their_tests() -> None:
    """Names the test that made a process which nobody waited for: it fails a later test."""
    plain, shown = BaseSubprocessTransport.__init__, BaseSubprocessTransport.__repr__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        self._made_by = os.environ.get("PYTEST_CURRENT_TEST")
        plain(self, *arguments, **options)

    def named(self: Any) -> str:
        return f"{shown(self)} of {self._made_by}"

    BaseSubprocessTransport.__init__ = init  # type: ignore[method-assign]
    BaseSubprocessTransport.__repr__ = named  # type: ignore[method-assign]


_name_their_tests()

# How long an example takes says more of the machine than of the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the garbage collector from what is imported and collected, which is no garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def local_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[local.LocalStack]:
    """A real Kafka and a real registry on free ports. They end with the session, killed or not.

    Each process that runs tests has its own: commands without `--namespace` take the newest run.
    """
    state = tmp_path_factory.mktemp("stack")
    yield local.up(state, kafka_port=0, registry_port=0, owner_pid=os.getpid())
    local.down(state, wipe=True)


@pytest.fixture(scope="session")
def kafka(local_stack: local.LocalStack) -> str:
    """The bootstrap servers of a real broker."""
    return local_stack.bootstrap_servers


@pytest.fixture(scope="session")
def registry_url(local_stack: local.LocalStack) -> str:
    """The root of a real registry, path included."""
    return local_stack.registry_url


@pytest.fixture
def namespace() -> str:
    """A name that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Marks what needs a real broker, so that `make test-fast` can leave it out, and sorts."""
    for item in items:
        if "local_stack" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.stack)
    yield
    items[:] = by_turns(items)


def by_turns(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Alternates files of whole runs, which keep all processors busy, and others, which wait.

    Workers take one file after the other, so they have one of each more often than two of a kind.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    runs = [file for path, file in files.items() if path.parent.name in ("e2e", "integration")]
    others = [file for file in files.values() if file not in runs]
    others.sort(key=lambda file: file[0].path.parent.name != "simulation")  # these take longest
    turns = zip_longest(runs, others, fillvalue=())
    return [item for turn in turns for file in turn for item in file]
