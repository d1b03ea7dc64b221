"""A run of which nothing runs any more: its versions can be exported, and they answer."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.infra import local
from tests.e2e import harness

HEADRACE = (sys.executable, "-m", "headrace")
RUN_S = 300.0


@pytest.mark.long
def test_a_version_of_a_run_without_processes_is_exported_and_answers(state: Path) -> None:
    """Export and chat start the local stack and stop it again. Ctrl-C leaves nothing behind."""

    def headrace(*words: str, text: str = "") -> str:
        done = subprocess.run(
            [*HEADRACE, *words, "--state", str(state)],
            input=text, capture_output=True, text=True, timeout=RUN_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert local.find(state) is None
        return done.stdout

    headrace("run", "quickstart", "--quiet", "--set", "stop.versions=1", "--set", "stop.reward=9")
    folder = state / "exported"
    facts = json.loads(headrace("export", str(folder), "--quiet", "--json"))
    assert facts["namespace"] == "quickstart"
    said = [
        headrace("chat", *model, "--temperature", "0", "--max-tokens", "5", text="A\nB\n")
        for model in ((), (str(folder),))
    ]
    # The run's recipe allows four tokens. A folder has no recipe.
    assert len(said[0].strip()) > 0
    assert set(said[0]) <= {*"LDRU", "\n"}
    assert said[1].strip()
    began = subprocess.Popen([*HEADRACE, "export", str(state / "other"), "--state", str(state)])
    harness.run_bounded(asyncio.sleep(2), 10)
    began.send_signal(signal.SIGINT)
    assert began.wait(30) == 130
    assert local.find(state) is None
    assert [path.name for path in state.glob("*other*")] == []
