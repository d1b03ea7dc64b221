"""One private Docker engine for all tests of sandboxes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sandboxes.docker_engine import docker_engine, why_not


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The DOCKER_HOST of an engine that has IMAGE."""
    if reason := why_not():
        pytest.skip(reason)
    with docker_engine(tmp_path_factory.mktemp("docker")) as host:
        yield host
