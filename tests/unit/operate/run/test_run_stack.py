"""The local stack is started only for a folder that has had one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.operate.run.run_stack import running_stack


def test_a_folder_without_a_run_gets_no_stack(tmp_path: Path) -> None:
    async def start() -> None:
        async with running_stack(ClusterConfig(tmp_path), lambda line: None):
            pass

    with pytest.raises(UsageError, match="holds no run"):
        asyncio.run(start())
    assert list(tmp_path.iterdir()) == []
