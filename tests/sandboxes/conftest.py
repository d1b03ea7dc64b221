"""One private Docker engine for all tests of sandboxes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.sandboxes.docker_engine import docker_engine, why_not


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The DOCKER_HOST of an engine that has IMAGE."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # all workers use one
        folder = folder.parent
    with docker_engine(tmp_path_factory.mktemp("docker"), folder / "docker-engine") as host:
        yield host
