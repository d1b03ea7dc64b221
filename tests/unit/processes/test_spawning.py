"""Processes of multiprocessing end with their parent, even before they have imported anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

SPAWNS = """
import multiprocessing, time
from headrace.services.processes.spawning import spawned_end_with_parent

if __name__ == "__mp_main__":
    time.sleep(60)  # an import that takes long

def work():
    time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with spawned_end_with_parent():
        child = context.Process(target=work)
        child.start()
    print(child.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills the children of a parent")
def test_a_process_that_still_imports_ends_with_its_parent(tmp_path: Path) -> None:
    program = tmp_path / "spawns.py"
    program.write_text(SPAWNS)
    with subprocess.Popen((sys.executable, program), stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        with pytest.raises(psutil.TimeoutExpired):  # it has begun, and goes on
            child.wait(1)
        parent.kill()
        child.wait(10)


WORKS = """
import multiprocessing
from headrace.services.processes.spawning import spawned_end_with_parent

def work(pipe):
    pipe.send("done")

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with spawned_end_with_parent():
        child = context.Process(target=work, args=(theirs,))
        child.start()
    print(ours.recv())
    child.join()
    print(child.exitcode)
"""


def test_it_gets_its_pipes_and_its_exit_code_is_seen(tmp_path: Path) -> None:
    program = tmp_path / "works.py"
    program.write_text(WORKS)
    done = subprocess.run((sys.executable, program), capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["done", "0"], done.stderr
