"""Bytes that go into a command in a pod, by a cluster on paper that runs it on this machine."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path

import pytest
from aiohttp import web
from kubernetes.aio.config import kube_config

from headrace.services.env.sandbox import container_names
from headrace.services.processes.docker.hardened import Limits
from headrace.services.processes.kubernetes.cluster_client import PROTOCOLS
from headrace.services.processes.kubernetes.command_stream import STDERR, STDOUT
from headrace.services.processes.kubernetes.hardened_pod import CONTAINER, NAME
from headrace.services.processes.kubernetes.pods_engine import PodsEngine

POD = "headrace.ns.12-3-0.5-77.abcdef012345.4"
READER = """
import os, sys, time
os.dup2(1, 2)  # as the wrapper of every command in a sandbox does
time.sleep(0.3)
print(len(sys.stdin.buffer.read(int(sys.argv[1]))))
"""


async def pod(request: web.Request) -> web.Response:
    container = {"name": CONTAINER, "state": {"running": {}}}
    status = {"phase": "Running", "containerStatuses": [container]}
    return web.json_response({"metadata": {"annotations": {NAME: POD}}, "status": status})


async def execute(request: web.Request) -> web.WebSocketResponse:
    """Runs a command. As containerd, it ends the input as soon as one of the outputs has ended."""
    connection = web.WebSocketResponse(protocols=PROTOCOLS)
    await connection.prepare(request)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *request.query.getall("command"), stdin=pipe, stdout=pipe, stderr=pipe
    )
    assert process.stdin
    assert process.stdout
    assert process.stderr
    stdin = process.stdin

    async def pass_input() -> None:
        async for message in connection:
            stdin.write(message.data[1:])
            await stdin.drain()

    async def pass_output(channel: int, output: asyncio.StreamReader) -> None:
        while data := await output.read(65_536):
            await connection.send_bytes(bytes((channel,)) + data)
        passing.cancel()
        stdin.close()

    passing = asyncio.create_task(pass_input())
    await asyncio.gather(pass_output(STDOUT, process.stdout), pass_output(STDERR, process.stderr))
    assert await process.wait() == 0
    await connection.send_bytes(b"\x03" + json.dumps({"status": "Success"}).encode())
    return connection


@asynccontextmanager
async def paper_cluster(folder: Path) -> AsyncIterator[Path]:
    """Serves one pod. Yields the kubeconfig."""
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/sandboxes/pods/{name}", pod)
    app.router.add_get("/api/v1/namespaces/sandboxes/pods/{name}/exec", execute)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        kubeconfig = {
            "clusters": [{"name": "paper", "cluster": {"server": url}}],
            "users": [{"name": "worker", "user": {"token": "t"}}],
            "contexts": [{"name": "paper", "context": {"cluster": "paper", "user": "worker"}}],
        }
        (folder / "kubeconfig").write_text(json.dumps(kubeconfig))
        yield folder / "kubeconfig"
    finally:
        await runner.cleanup()


def test_a_command_that_joins_its_outputs_gets_all_of_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 1_000_000
    command = (sys.executable, "-c", READER, str(size))
    monkeypatch.setenv("no_proxy", "*")

    async def main() -> None:
        async with paper_cluster(tmp_path) as kubeconfig:
            # The client reads KUBECONFIG when it is imported.
            monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
            engine = PodsEngine("kubernetes://paper/sandboxes", Limits(), container_names.read)
            try:
                given = BytesIO(bytes(size))
                async with engine.run(POD, command, "", "/", given) as (run_id, output):
                    said = b""
                    while chunk := await output.read():
                        said += chunk
                    assert (said, await engine.exit_code(run_id)) == (b"1000000\n", 0)
            finally:
                await engine.aclose()

    asyncio.run(main())
