"""An env worker is killed on a real broker: its environments go on at other workers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.infra.local import LocalStack
from headrace.services.namespace.cluster_config import ClusterConfig
from tests.bench.env_pools import KILLED_S, after_kill


@pytest.mark.long
def test_the_environments_of_a_killed_worker_are_rebuilt_elsewhere(
    local_stack: LocalStack,
) -> None:
    cluster = ClusterConfig(Path(local_stack.state)).connected(
        local_stack.bootstrap_servers, local_stack.registry_url
    )
    waited, attempts = asyncio.run(after_kill(cluster))
    assert waited
    assert max(waited) < KILLED_S - 2.0, "every action is answered, after a session of 6 s"
    assert set(attempts) == {1}, "no episode needs another attempt"
