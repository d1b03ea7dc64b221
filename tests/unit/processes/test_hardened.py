"""Limits of containers that make each other useless are refused."""

from __future__ import annotations

import pytest

from headrace.errors import UsageError
from headrace.services.agent.gateway.container import ContainerSettings
from headrace.services.processes.docker.hardened import Limits, read_limits


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, True),
        ({"memory_mb": 97}, True),
        ({"memory_mb": 96}, False),
        ({"memory_mb": 64, "disk_mb": 16}, True),
        ({"disk_mb": 250}, False),
    ],
)
def test_files_leave_memory_for_processes(options: dict[str, int], allowed: bool) -> None:
    if allowed:
        read_limits(Limits, options, "options of x")
        return
    with pytest.raises(UsageError, match=r"options of x: disk_mb: .*files may take \d+ MiB"):
        read_limits(Limits, options, "options of x")


def test_it_holds_for_the_defaults_of_agents() -> None:
    with pytest.raises(UsageError, match="disk_mb"):
        read_limits(ContainerSettings, {"image": "x", "memory_mb": 128}, "container")
    read_limits(ContainerSettings, {"image": "x"}, "container")
