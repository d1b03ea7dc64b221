"""The Docker SDK's client, and the engine that it uses. This module needs the extra `docker`."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import requests
from docker.context import ContextAPI
from docker.context.config import get_current_context_name
from docker.errors import DockerException
from docker.transport.unixconn import (
    UnixHTTPAdapter,
    UnixHTTPConnection,
    UnixHTTPConnectionPool,
)
from docker.utils import kwargs_from_env, parse_host
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError

from headrace.errors import InfrastructureError, UsageError
from headrace.services.processes.docker.docker_errors import refused
from headrace.services.processes.docker.ssh_forward import is_ssh, read_ssh_address

UNIX = "http+docker://localhost"
"""The beginning of the SDK's URLs if the engine listens at a Unix socket."""
SDK_ERRORS = (DockerException, HTTPError, OSError)
"""What a call raises if it gets no answer, or if the SDK itself refuses it."""


def failed(error: Exception, call: str, limit_s: float, said: str = "") -> InfrastructureError:
    """Returns the error for one of SDK_ERRORS. `limit_s` is the time that the call had.

    `said` is what ssh said meanwhile, if the engine is reached by it.
    """
    broken: BaseException | None = None
    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, InfrastructureError):  # The engine refused to say its version.
            return reason
        if isinstance(reason, (TimeoutError, requests.Timeout)):
            return InfrastructureError("engine_silent", f"{call}: no answer in {limit_s:g} s")
        if isinstance(reason, (HTTPError, OSError)):
            broken = reason
        reason = reason.__cause__ or reason.__context__
    if broken is None:
        return InfrastructureError("engine_error", f"{call}: {error}")
    meanwhile = f" (ssh said meanwhile: {said})" if said else ""
    why = f"{type(broken).__name__}: {broken}{meanwhile}"
    return InfrastructureError("engine_unreachable", f"{call}: {why}")


@dataclass(frozen=True, slots=True)
class Host:
    """An engine's address, and the setting that names it."""

    url: str
    """As in DOCKER_HOST: `unix:///var/run/docker.sock`, `tcp://HOST:PORT`, `ssh://USER@HOST`."""
    tls: docker.TLSConfig | bool
    named_by: str

    @property
    def local(self) -> bool:
        """Whether the engine listens at a Unix socket, so that it should see this host's files."""
        return not is_ssh(self.url) and str(parse_host(self.url)).startswith("http+unix:")


def find_host(url: str | None = None, tls: str = "") -> Host:
    """Returns the engine at `url`, by default the one that the command `docker` would use.

    `tls` is the folder of the files for TLS, if the engine at `url` needs it. Raises UsageError if
    it can't be used.
    """
    host = _with_tls(url, tls) if url and tls else _named(url)
    try:
        if is_ssh(host.url):
            read_ssh_address(host.url)
        else:
            parse_host(host.url)
    except ValueError as error:
        raise UsageError(f"{host.named_by}: {error}") from None
    except DockerException as error:
        if "@" in host.url:
            raise UsageError(
                f"{host.named_by} names an address with `@`, which only ssh://USER@HOST may have. "
                "It is not shown here, since it may have a password"
            ) from None
        raise UsageError(f"{host.named_by} names {host.url!r}: {error}") from error
    return host


def _with_tls(url: str, folder: str) -> Host:
    ca, cert, key = (str(Path(folder) / f"{name}.pem") for name in ("ca", "cert", "key"))
    try:
        tls = docker.TLSConfig(client_cert=(cert, key), ca_cert=ca, verify=True)
    except DockerException as error:
        raise UsageError(
            f"the host {url!r} has tls = {folder!r}, which must be a folder with ca.pem, cert.pem "
            f"and key.pem: {error}"
        ) from error
    return Host(url.replace("tcp://", "https://", 1), tls, "the option `hosts`")


def _named(url: str | None) -> Host:
    environment = {**os.environ, **({"DOCKER_HOST": url} if url else {})}
    if not environment.get("DOCKER_HOST"):
        name = os.environ.get("DOCKER_CONTEXT") or get_current_context_name() or "default"
        context = ContextAPI.get_context(name)
        if context is None or not context.Host:
            raise UsageError(
                f"there is no Docker context {name!r}. `docker context ls` lists them; choose one "
                "with `docker context use` or DOCKER_CONTEXT, or set DOCKER_HOST"
            )
        return Host(context.Host, context.TLSConfig or False, f"the Docker context {name!r}")
    try:
        found = kwargs_from_env(environment)
    except DockerException as error:
        raise UsageError(
            "DOCKER_TLS_VERIFY or DOCKER_CERT_PATH asks for TLS, which needs ca.pem, cert.pem and "
            f"key.pem in {environment.get('DOCKER_CERT_PATH') or '~/.docker'}: {error}"
        ) from error
    return Host(found["base_url"], found.get("tls", False), "DOCKER_HOST")


class DockerClient(docker.APIClient):
    """The SDK's client. It raises the errors of `docker_errors.py`.

    When it is made, it asks the engine for its version of the API and then uses that.
    """

    def __init__(self, host: Host, connections: int, answer_s: int, longest_s: int) -> None:
        """Keeps up to `connections` idle connections.

        A call waits `answer_s` seconds for the engine's next bytes, and `longest_s` if the SDK sets
        no limit to it.
        """
        self._adapter = (
            UnixAdapter(str(parse_host(host.url)), answer_s, connections)
            if host.local
            else HTTPAdapter(pool_maxsize=connections)
        )
        self._longest_s = longest_s
        super().__init__(base_url=host.url, tls=host.tls, version="auto", timeout=answer_s)
        # A Unix socket has no proxy. Without this, requests looks for its settings at each call.
        self.trust_env = not host.local

    def get_adapter(self, url: str) -> HTTPAdapter:
        """Returns our adapter, for all requests."""
        return self._adapter

    def close(self) -> None:
        """Closes the idle connections."""
        self._adapter.close()

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Sends one request, like `requests.Session.send`."""
        # The SDK sets no limit to a pull.
        options["timeout"] = options.get("timeout") or self._longest_s
        # Without this, requests checks an engine against REQUESTS_CA_BUNDLE if that is set.
        options["verify"] = self.verify or False
        response = super().send(request, **options)
        if response.status_code >= 400:
            call = f"{request.method} {request.path_url}"
            raise refused(response.status_code, response.text, call)
        return response


class UnixAdapter(UnixHTTPAdapter):
    """Sends everything through one pool of connections.

    The SDK's own adapter has a pool for each URL and closes the oldest pool. So it does not reuse
    connections, and a thread may find that its pool has just been closed.
    """

    def __init__(self, url: str, answer_s: int, connections: int) -> None:
        super().__init__(url, answer_s)
        self._pool = UnixPool(UNIX, self.socket_path, answer_s, connections)

    def get_connection(self, url: str | bytes, proxies: Any = None) -> UnixPool:
        """Returns the pool."""
        return self._pool

    def close(self) -> None:
        """Closes the idle connections."""
        self._pool.close()


class UnixPool(UnixHTTPConnectionPool):
    """Connections to a Unix socket."""

    def _new_conn(self) -> Any:
        return UnixConnection(self.base_url, self.socket_path)


class UnixConnection(UnixHTTPConnection):
    """Closes its socket if it can't connect. The SDK's own class leaves the socket open."""

    def connect(self) -> None:
        """Connects."""
        self.sock = socket.socket(socket.AF_UNIX)  # set first, because urllib3 closes it
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.unix_socket)
