"""What a service sets up before it works."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from headrace.services.operate.serve.process_setup import MOST_FILES

SERVE = """
import os, resource, sys
from pathlib import Path
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.operate.serve.serve import serve

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
reading, writing = os.pipe()
os.close(writing)  # its parent ends before it says where to connect
cluster, recipe = ClusterConfig(Path("nowhere")), read_recipe("null")
serve(sys.argv[1], recipe, cluster, policy=None, listen="", metrics=("", 0), parent_fd=reading)
print(*resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getscheduler(0))
"""


def set_up(service: str) -> list[int]:
    """Returns both limits of open files of a service's process, and its scheduling policy."""
    command = [sys.executable, "-c", SERVE, service]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


def test_a_service_may_open_as_many_files_as_the_system_allows() -> None:
    soft, hard, _ = set_up("env")
    assert hard == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert soft == (MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES))


@pytest.mark.parametrize(
    ("service", "policy"),
    [("agent", os.SCHED_BATCH), ("env", os.SCHED_BATCH), ("inference", os.SCHED_OTHER)],
)
def test_only_services_that_compute_nothing_are_scheduled_as_batch(
    service: str, policy: int
) -> None:
    assert set_up(service)[2] == policy
