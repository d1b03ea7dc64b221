"""Runs `headrace` commands to their end.

Their imports take a second of processor time. So those that only ask or tell something are forked
from a process that has done them. A fork has its own arguments, variables, streams and exit code.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from headrace.infra import local

WHOLE = ("run", "end", "evaluate", "replay", "serve")
"""Commands that do more than ask or tell: they start as their users start them."""
FORKS = """
import json, os, select, sys
import headrace.services.namespace.lookup
from headrace.services.operate import cli

for line in sys.stdin:
    arguments, environment, streams = json.loads(line)
    if not (pid := os.fork()):
        for number, path in enumerate(streams):
            flags = os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY
            os.dup2(os.open(path, flags), number)
        sys.stdin = open(0)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["headrace", *arguments]
        cli.main()
    if sys.platform == "linux":
        ended = os.pidfd_open(pid)
        if 0 in select.select([ended, 0], [], [])[0]:  # the tests were killed
            os.kill(pid, 9)
        os.close(ended)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def cluster_variables(
    stack: local.LocalStack, namespace: str | None = None, state: Path | None = None
) -> dict[str, str]:
    """Returns the variables that name a cluster to a command."""
    variables = {
        "HEADRACE_BOOTSTRAP_SERVERS": stack.bootstrap_servers,
        "HEADRACE_REGISTRY_URL": stack.registry_url,
    }
    if namespace is not None:
        variables["HEADRACE_NAMESPACE"] = namespace
    if state is not None:
        variables["HEADRACE_STATE"] = str(state)
    return variables


def run_command(
    arguments: tuple[str, ...],
    environment: Mapping[str, str],
    *,
    stdin: str = "",
    timeout_s: float = 150,
) -> subprocess.CompletedProcess[str]:
    """Runs a command with these variables, beside those of this process."""
    variables = {**os.environ, **environment}
    if arguments[0] in WHOLE:
        return subprocess.run(
            [sys.executable, "-m", "headrace", *arguments], env=variables, input=stdin,
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        streams = [Path(name) / stream for stream in ("stdin", "stdout", "stderr")]
        streams[0].write_text(stdin)
        code = _fork([arguments, variables, [str(path) for path in streams]], timeout_s)
        said, errors = (path.read_text() for path in streams[1:])
    return subprocess.CompletedProcess(["headrace", *arguments], code, said, errors)


def _fork(request: object, timeout_s: float) -> int:
    forks = _forks()
    assert forks.stdin is not None
    assert forks.stdout is not None
    forks.stdin.write(f"{json.dumps(request)}\n".encode())
    forks.stdin.flush()
    answered, _, _ = select.select([forks.stdout], [], [], timeout_s)
    assert answered, f"still running after {timeout_s:g} s: {request}"
    return int(forks.stdout.readline())


@cache
def _forks() -> subprocess.Popen[bytes]:
    """The process that forks. It ends with this one, and is in a session of its own."""
    made = subprocess.Popen(
        [sys.executable, "-c", FORKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    atexit.register(made.communicate)
    return made
