"""Ends a stack's processes, and keeps the start-up archives that they write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.infra.local import detached as processes
from headrace.infra.local import java_runtime as runtime
from headrace.infra.local import stack_record as record
from headrace.infra.local.security.stack_secrets import remove_secrets

STOP_BOUND_S = 20.0
_UNREADY_BOUND_S = 2.0  # a server that is still starting has nothing to finish
_RECORDING_BOUND_S = 240.0  # as it ends, Java writes its archive: 8 s, but longer on a busy machine


def take_down(
    state: Path, stack: record.Stack, on_progress: Callable[[str], None] = lambda _: None
) -> bool:
    """Ends all processes of `stack`, and deletes its record and its secrets.

    Returns whether a server ran.
    """
    # End the guard first, because it would do the same. The caller may be the guard.
    if stack.guard and stack.guard.pid != os.getpid():
        processes.stop([stack.guard], STOP_BOUND_S)
    if any(server.serves and server.recording for server in stack.servers.values()):
        on_progress("writing Java start-up archives")
    ran = any(server.process.alive for server in stack.servers.values())
    stop_servers(list(stack.servers.values()))
    (state / record.FILE).unlink(missing_ok=True)
    shutil.rmtree(state / "tmp", ignore_errors=True)
    remove_secrets(state)
    return ran


def stop_servers(servers: Sequence[record.Server]) -> None:
    """Ends `servers` at the same time. Raises DependencyError if one can't be ended."""
    bound_s = _UNREADY_BOUND_S
    if any(server.serves for server in servers):
        recording = any(server.serves and server.recording for server in servers)
        bound_s = _RECORDING_BOUND_S if recording else STOP_BOUND_S
    served = {server.process for server in servers if server.serves}
    ended = processes.stop([server.process for server in servers], bound_s)
    for server in servers:
        if server.recording:
            whole = ended and server.process in served
            runtime.keep_recording(server.recording, whole=whole)
