"""What a service sets up before it works."""

from __future__ import annotations

import resource
import subprocess
import sys

from headrace.services.operate.serve.process_setup import MOST_FILES

SERVE = """
import os, resource
from pathlib import Path
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.operate.serve.serve import serve

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
reading, writing = os.pipe()
os.close(writing)  # its parent ends before it says where to connect
cluster, recipe = ClusterConfig(Path("nowhere")), read_recipe("null")
serve("env", recipe, cluster, policy=None, listen="", metrics=("", 0), parent_fd=reading)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_a_service_may_open_as_many_files_as_the_system_allows() -> None:
    done = subprocess.run([sys.executable, "-c", SERVE], capture_output=True, text=True, check=True)
    soft, hard = map(int, done.stdout.split())
    assert hard == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert soft == (MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES))
