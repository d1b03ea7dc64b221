"""How `headrace dashboard` exits."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SERVING = """
from headrace.services.operate import cli
from headrace.services.operate.dashboard import dashboard

async def serve(*_, stopping, **options):
    print("serves", flush=True)
    await stopping.wait()

dashboard.serve_dashboard = serve
cli.main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_ctrl_c_has_the_exit_code_of_other_commands(number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-c", SERVING, "dashboard"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as serving:
        assert serving.stdout is not None
        assert serving.stdout.readline() == b"serves\n"
        serving.send_signal(number)
        _, said = serving.communicate(timeout=30)
    assert (serving.returncode, said) == (code, b"")
