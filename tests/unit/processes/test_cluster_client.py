"""Calls of an API server on paper that throttles, and whose tokens expire."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio.config import kube_config

from headrace.errors import InfrastructureError
from headrace.services.processes.kubernetes import cluster_client
from headrace.services.processes.kubernetes.cluster_address import read_address
from headrace.services.processes.kubernetes.cluster_client import PROTOCOLS, ClusterClient

PODS = "/api/v1/namespaces/sandboxes/pods"
EXEC = f"{PODS}/a/exec"


class PaperServer:
    """An API server that refuses some requests before it does anything."""

    def __init__(self, folder: Path) -> None:
        self.kubeconfig = folder / "kubeconfig"
        self.token = "0"
        self.url = ""
        self.busy = 0
        """How many further requests it throttles."""
        self.retry_after = "0"
        self.asked: Counter[int] = Counter()
        """How many requests it answered with each status."""

    def issue(self, token: str) -> None:
        """Takes only this token from now on, which is in the kubeconfig."""
        self.token = token
        context = {"cluster": "paper", "user": "worker"}
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "clusters": [{"name": "paper", "cluster": {"server": self.url}}],
                    "users": [{"name": "worker", "user": {"token": token}}],
                    "contexts": [{"name": "paper", "context": context}],
                }
            )
        )

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return self._said(401)
        if self.busy:
            self.busy -= 1
            return self._said(429, {"Retry-After": self.retry_after})
        if request.path != EXEC:
            return self._said(200)
        connection = web.WebSocketResponse(protocols=PROTOCOLS)
        await connection.prepare(request)
        async for message in connection:
            await connection.send_bytes(message.data)
        return connection

    def _said(self, status: int, headers: dict[str, str] | None = None) -> web.Response:
        self.asked[status] += 1
        return web.json_response({"message": str(status)}, status=status, headers=headers)


@asynccontextmanager
async def paper(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[PaperServer, ClusterClient]]:
    made, app = PaperServer(folder), web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    client = ClusterClient(read_address("kubernetes://paper/sandboxes"))
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        made.issue("1")
        # The client reads KUBECONFIG when it is imported.
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(made.kubeconfig))
        monkeypatch.setenv("no_proxy", "*")
        async with asyncio.timeout(30):
            yield made, client
    finally:
        await client.aclose()
        await runner.cleanup()


async def echoed(command: aiohttp.ClientWebSocketResponse, data: bytes) -> Any:
    await command.send_bytes(data)
    return (await command.receive()).data


def test_a_throttled_call_is_made_again_when_the_server_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with paper(tmp_path, monkeypatch) as (made, client):
            for method, body in (("GET", None), ("POST", {"a": 1}), ("PATCH", [])):
                made.busy = 3
                await client.call(method, PODS, body)
            assert made.asked == {200: 3, 429: 9}
            made.busy = 3
            command = await client.open_command(EXEC, "c", ("true",), stdin=True)
            assert (await echoed(command, b"x"), made.busy) == (b"x", 0)
            await command.close()

    asyncio.run(main())


def test_a_server_that_throttles_for_long_is_busy_and_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with paper(tmp_path, monkeypatch) as (made, client):
            await client.call("GET", PODS)  # it has connected
            monkeypatch.setattr(cluster_client, "CALL_S", 4.0)  # time for at least one answer
            made.busy, made.retry_after = 1 << 30, "1"
            ended = await asyncio.gather(
                client.call("GET", PODS),
                client.open_command(EXEC, "c", ("true",), stdin=False),
                return_exceptions=True,
            )
            assert made.asked[429] >= 2
            for error in ended:
                assert isinstance(error, InfrastructureError)
                assert re.match(r"engine_busy: .*429", str(error)), error

    asyncio.run(main())


def test_a_token_that_expires_ends_no_command_and_no_other_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0
    configuration = cluster_client._configuration

    async def counting(address: Any) -> Any:
        nonlocal read
        read += 1
        return await configuration(address)

    monkeypatch.setattr(cluster_client, "_configuration", counting)

    async def main() -> None:
        async with paper(tmp_path, monkeypatch) as (made, client):
            running = await client.open_command(EXEC, "c", ("true",), stdin=True)
            made.issue("2")
            await asyncio.gather(*(client.call("GET", PODS) for _ in range(50)))
            assert read == 2  # all calls use what the first one read
            assert await echoed(running, b"still there") == b"still there"
            made.issue("3")
            another = await client.open_command(EXEC, "c", ("true",), stdin=True)
            assert await echoed(another, b"x") == b"x"
            assert await echoed(running, b"y") == b"y"
            made.token = "none has it"
            with pytest.raises(InfrastructureError, match=r"engine_error: .*401"):
                await client.call("GET", PODS)
            for command in (running, another):
                await command.close()

    asyncio.run(main())
