"""The official asynchronous client, and its calls as JSON. This module needs the extra
`kubernetes`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import uniform
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import client, config

from headrace.errors import InfrastructureError, UsageError
from headrace.services.base.redactor import REDACTOR
from headrace.services.processes.call_turns import CallTurns
from headrace.services.processes.docker.docker_errors import Conflict, NotThere
from headrace.services.processes.kubernetes.cluster_address import ClusterAddress

CALL_S = 60.0
"""Seconds that the API server has for one call."""
CALLS = 64
"""Most calls at the same time."""
PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
HEARTBEAT_S = 30.0
"""Seconds between two pings of a command's connection, so that a broken one is noticed."""
PATCH: dict[type, str] = {
    list: "application/json-patch+json",
    dict: "application/strategic-merge-patch+json",
}
UNAUTHORIZED = 401
THROTTLED = 429
"""The API server has done nothing, and says when to ask again."""
WAIT_S = 1.0
"""Seconds until a call is made again if the API server does not say when."""
LONGEST_WAIT_S = 15.0
GATEWAY = (502, 503, 504)
"""What answers if no API server does."""


class ClusterClient:
    """Calls of one cluster's API server. The first one connects."""

    def __init__(self, address: ClusterAddress) -> None:
        self._address = address
        self._api: client.ApiClient | None = None
        self._retired: list[tuple[float, client.ApiClient]] = []
        """Clients with old credentials, and when their last calls will have ended."""
        self._commands: aiohttp.ClientSession | None = None
        self._connecting = asyncio.Lock()
        self._turns = CallTurns(CALLS)
        self._closed = False

    async def aclose(self) -> None:
        """Closes its connections. What runs in pods goes on."""
        self._closed = True
        async with self._connecting:
            if self._commands is not None:
                await self._commands.close()
            if self._api is not None:
                await self._api.close()
            for _, api in self._retired:
                await api.close()

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        **query: str,
    ) -> dict[str, Any]:
        """Makes one call and returns the answer.

        A body of PATCH is a JSON patch if it is a list. Raises NotThere, Conflict, or another
        InfrastructureError.
        """
        headers = {"Accept": "application/json"}
        if method == "PATCH":
            headers["Content-Type"] = PATCH[type(body)]
        what = f"{self._address}: {method} {path}"
        patience = _Patience(what)
        try:
            await self._turns.take(CALL_S)
            try:
                async with asyncio.timeout(CALL_S):
                    while True:
                        api = await self._connected()
                        status, found, text = await self._send(
                            api, method, path, query, headers, body
                        )
                        patience.heard = True
                        if not await self._ask_again(api, status, found, patience):
                            break
            finally:
                self._turns.end(answered=patience.heard)
        except TimeoutError as error:
            raise patience.ended() from error
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(what, _words(error)) from error
        if not 200 <= status < 300:
            raise refused(status, text, what)
        tree = json.loads(text)
        return tree if isinstance(tree, dict) else {}

    async def open_command(
        self, path: str, container: str, command: Sequence[str], *, stdin: bool
    ) -> aiohttp.ClientWebSocketResponse:
        """Begins a command in a container. Returns its connection."""
        query = [("container", container), ("stdout", "true"), ("stderr", "true")]
        query += [("stdin", "true")] if stdin else []
        query += [("command", part) for part in command]
        what = f"{self._address}: run a command: {path}"
        patience = _Patience(what)
        try:
            async with asyncio.timeout(CALL_S):
                while True:
                    api = await self._connected()
                    try:
                        return await self._connect_command(api, path, urlencode(query))
                    except aiohttp.WSServerHandshakeError as error:
                        # Nothing has begun: the API server refused to pass the command on.
                        if not await self._ask_again(api, error.status, error.headers, patience):
                            raise
        except TimeoutError as error:
            raise patience.ended() from error
        except aiohttp.WSServerHandshakeError as error:
            if error.status in GATEWAY:
                raise _unreachable(what, f"{error.status} {error.message}") from error
            # 500: the API server can't reach the node, or the container has just ended.
            raise refused(error.status, error.message, what) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(what, _words(error)) from error

    async def _connect_command(
        self, api: client.ApiClient, path: str, query: str
    ) -> aiohttp.ClientWebSocketResponse:
        assert self._commands is not None
        _, url, headers, *_ = await api.param_serialize("GET", path, auth_settings=["BearerToken"])
        return await self._commands.ws_connect(
            f"{url}?{query}",
            headers={key: str(value) for key, value in headers.items()},
            protocols=PROTOCOLS,
            heartbeat=HEARTBEAT_S,
            timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
            proxy=api.configuration.proxy,
            ssl=api.rest_client.ssl_context,
            server_hostname=api.configuration.tls_server_name,
        )

    async def _ask_again(
        self, api: client.ApiClient, status: int, headers: Any, patience: _Patience
    ) -> bool:
        """Returns whether a refused call should be made again, and waits until then."""
        patience.throttled = status == THROTTLED
        if patience.throttled:
            await asyncio.sleep(_wait_s(headers))
            return True
        if status != UNAUTHORIZED or patience.renewed:
            return False
        patience.renewed = True  # a token may have expired
        async with self._connecting:
            if self._api is api:  # no other call was faster
                self._api = None
                await self._retire(api)
        return True

    async def _retire(self, api: client.ApiClient) -> None:
        """Closes a client once no call of it can run any more."""
        now = asyncio.get_running_loop().time()
        over = [old for until, old in self._retired if until < now]
        self._retired = [each for each in self._retired if each[0] >= now]
        self._retired.append((now + CALL_S, api))
        for old in over:
            await old.close()

    async def _send(
        self,
        api: client.ApiClient,
        method: str,
        path: str,
        query: Mapping[str, str],
        headers: dict[str, str],
        body: Any,
    ) -> tuple[int, Mapping[str, str], str]:
        parameters = await api.param_serialize(
            method, path, query_params=list(query.items()), header_params=dict(headers),
            body=body, auth_settings=["BearerToken"],
        )  # fmt: skip
        answer = await api.call_api(*parameters, _request_timeout=CALL_S)
        text = (await answer.read()).decode("utf-8", "replace")
        return answer.status, answer.headers, text

    async def _connected(self) -> client.ApiClient:
        async with self._connecting:
            if self._closed:
                raise InfrastructureError("engine_closed", "the worker is ending")
            if self._api is None:
                found = await _configuration(self._address)
                found.connection_pool_maxsize = CALLS
                self._api = client.ApiClient(found)
            if self._commands is None:
                connector = aiohttp.TCPConnector(limit=0)
                self._commands = aiohttp.ClientSession(connector=connector, trust_env=True)
            return self._api


@dataclass(slots=True)
class _Patience:
    """What is known of a call that may be made again."""

    what: str
    heard: bool = False
    """Whether the API server answered at all."""
    throttled: bool = False
    """Whether its last answer was that it has too much to do."""
    renewed: bool = False
    """Whether the credentials were read again."""

    def ended(self) -> InfrastructureError:
        """Returns the error of a call whose time is over."""
        if self.throttled:
            words = f"the API server answered 429, too many requests, for {CALL_S:g} s"
            return InfrastructureError("engine_busy", f"{self.what}: {words}")
        return InfrastructureError("engine_silent", f"{self.what}: no answer in {CALL_S:g} s")


def _wait_s(headers: Any) -> float:
    """Returns the seconds until a throttled call is made again, which differ between workers."""
    said = str((headers or {}).get("Retry-After", ""))
    wait_s = float(said) if said.isascii() and said.isdecimal() else WAIT_S  # it may be a date
    return min(LONGEST_WAIT_S, wait_s) * uniform(1.0, 1.5)


async def _configuration(address: ClusterAddress) -> client.Configuration:
    """Returns how to reach a cluster. Raises UsageError if that is not known."""
    made = client.Configuration()
    try:
        if not address.context and os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(made)
        else:
            await config.load_kube_config(
                context=address.context or None, client_configuration=made, persist_config=False
            )
    except (config.ConfigException, OSError) as error:
        raise UsageError(
            f"{address} can't be used: {error}. `kubectl config get-contexts` lists the contexts; "
            "KUBECONFIG names another file"
        ) from error
    return made


def refused(status: int, text: str, call: str) -> InfrastructureError:
    """Returns the error for an answer with a status of 400 or more."""
    try:
        message = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        message = text
    message = REDACTOR.text(f"{call}: {status}: {message.strip()}", 1000)
    if status == 404:
        return NotThere("sandbox_lost", message)
    if status in (400, 409, 422):  # 422: a JSON patch found another value than it tested for
        return Conflict("sandbox_conflict", message)
    return InfrastructureError("engine_error", message)


def _unreachable(call: str, words: str) -> InfrastructureError:
    return InfrastructureError("engine_unreachable", REDACTOR.text(f"{call}: {words}", 1000))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
