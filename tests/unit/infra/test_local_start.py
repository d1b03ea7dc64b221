"""The start of a local server that lost its port to another process."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.infra.local.detached import free_port
from headrace.infra.local.start import _lost_port


@pytest.mark.parametrize(
    ("line", "lost"),
    [
        ("java.net.BindException: Address already in use", True),
        ("ERROR Port 8081 seems to be in use by another process.", True),
        ("ERROR the data folder is damaged", False),
    ],
)
def test_the_log_says_whether_the_port_was_taken(tmp_path: Path, line: str, lost: bool) -> None:
    log = tmp_path / "server.log"
    log.write_text(line)
    assert _lost_port(log, free_port()) is lost
