"""Runs `headrace dashboard` beside `headrace run`, which goes on whatever happens to it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.operate.processes import headrace_command
from headrace.services.processes.signals import send_signal

END_S = 5.0
"""Seconds after SIGTERM until the child is killed."""
LONGEST_LINE = 1_000


def variables_of(cluster: ClusterConfig) -> dict[str, str]:
    """Returns the variables that name a cluster and a namespace to a command."""
    variables = {
        "HEADRACE_BOOTSTRAP_SERVERS": cluster.bootstrap_servers or "",
        "HEADRACE_REGISTRY_URL": cluster.registry_url or "",
        "HEADRACE_STATE": str(cluster.state.absolute()),
        "HEADRACE_BLOBS": cluster.blobs or "",
        "HEADRACE_NAMESPACE": cluster.namespace or "",
        "HEADRACE_KAFKA_PROPERTIES": " ".join(
            f"{name}={value}" for name, value in cluster.kafka_properties.items()
        ),
        "HEADRACE_CREDENTIALS": str(cluster.credentials or ""),
    }
    return {name: value for name, value in variables.items() if value}


async def show_dashboard(cluster: ClusterConfig, say: Callable[[str], None]) -> None:
    """Keeps a dashboard of `cluster.namespace` until it is cancelled. `say` gets its address.

    If the dashboard ends, `say` gets why, and this waits on. It raises nothing.
    """
    reading, writing = os.pipe()
    process = None
    try:
        process = await asyncio.create_subprocess_exec(
            *headrace_command("dashboard", "--parent-fd", str(reading)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **variables_of(cluster)},
            pass_fds=(reading,),
            start_new_session=True,
        )
        os.close(reading)
        reading = -1
        await _follow(process, say)
        await asyncio.Event().wait()
    except OSError as error:
        say(f"the dashboard can't be started: {error}. The run goes on without it")
        await asyncio.Event().wait()
    finally:
        os.close(writing)  # Its end asks the dashboard to end, as SIGTERM does.
        if reading >= 0:
            os.close(reading)
        if process is not None:
            await asyncio.shield(_end(process))


async def _follow(process: asyncio.subprocess.Process, say: Callable[[str], None]) -> None:
    """Passes the dashboard's address on, and says it if the dashboard ends."""
    assert process.stdout is not None
    last = ""
    async for line in process.stdout:
        text = line[:LONGEST_LINE].decode(errors="replace").strip()
        if text.startswith("http"):
            say(f"dashboard: {text}")
        last = text or last
    code = await process.wait()
    say(f"the dashboard ended with exit code {code}: {last}. `headrace dashboard` shows the run")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        send_signal(process, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            send_signal(process, signal.SIGKILL)
            await process.wait()
