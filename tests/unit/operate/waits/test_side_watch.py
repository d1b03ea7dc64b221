"""What this machine shows of a run's workers, on real processes."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.operate.waits.heard_workers import LifeRecord
from headrace.services.operate.waits.side_watch import SideWatch

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


def life(service: str, process: int, host: str = "") -> LifeRecord:
    """The record of a worker that lives."""
    name = f"{service}-host-{process}"
    return LifeRecord(service, "", "ready", "", 0.0, 60.0, host or socket.gethostname(), name)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc shows the commands of processes")
def test_a_killed_worker_of_this_machine_is_known() -> None:
    watch = SideWatch(ClusterConfig(Path(), "none", "none"), "test", None)
    with (
        subprocess.Popen([*SLEEP, "headrace"]) as env,
        subprocess.Popen(SLEEP) as trainer,
    ):
        try:
            lives = [life("env", env.pid), life("trainer", trainer.pid)]
            elsewhere = life("source", trainer.pid, "another host")
            assert watch.ended([*lives, elsewhere], 1.0) == {}
            trainer.kill()
            trainer.wait()
            gone = {lives[1].worker: 2.0}
            assert watch.ended([*lives, elsewhere], 2.0) == gone
            assert watch.ended([*lives, elsewhere], 3.0) == gone
            # Without a process of the run, the numbers may be those of a container.
            assert watch.ended([lives[1], life("agent", 1)], 4.0) == {}
        finally:
            env.kill()
            trainer.kill()
