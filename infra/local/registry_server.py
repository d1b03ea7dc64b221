"""Apicurio Registry, which speaks the protocol of Confluent's registry, with its own database file.

The database commits to the file system before it answers (`WRITE_DELAY=0`), so a schema's id
survives kill -9 as soon as a client has it. Records in the log name their schemas by these ids.
"""

from __future__ import annotations

import http.client
import ssl
from pathlib import Path

from headrace.infra.local.java_runtime import JavaRuntime
from headrace.infra.local.security.secure_settings import write_registry_settings

HEAP = ("-Xmx256m",)
PATH = "/apis/ccompat/v7"
_HOST, _REQUEST_BOUND_S = "127.0.0.1", 5.0

_SETTINGS = {
    "quarkus.http.host": "127.0.0.1",
    "quarkus.banner.enabled": "false",
    "quarkus.http.access-log.enabled": "false",
    # Log only problems, and the line which says that it has started.
    "quarkus.log.level": "WARN",
    'quarkus.log.category."io.quarkus".level': "INFO",
    'quarkus.log.category."io.apicurio".level': "WARN",
    "quarkus.log.console.format": "%d{yyyy-MM-dd'T'HH:mm:ss.SSSXXX} %p [%c] %m%n%e",
    "apicurio.storage.kind": "sql",
    "apicurio.storage.sql.kind": "h2",
    # Relative to the process's folder, because a user's path in a URL would need quoting.
    "apicurio.datasource.url": "jdbc:h2:file:./registry/registry;WRITE_DELAY=0",
    "apicurio.datasource.jdbc.initial-size": "1",
    "apicurio.datasource.jdbc.min-size": "1",
    "apicurio.datasource.jdbc.max-size": "8",
    # The default of 5 s is too short for a start on a busy machine, and ends the registry.
    "quarkus.datasource.h2.jdbc.acquisition-timeout": "60S",
    # The default is to look for changed log levels every second.
    "apicurio.logconfigjob.every": "1h",
}


def command(runtime: JavaRuntime, state: Path, port: int, *, secure: bool = False) -> list[str]:
    """Returns the registry's command line, which must be run in `state`."""
    settings = [f"-D{key}={value}" for key, value in _SETTINGS.items()]
    if secure:  # In a file, because everybody can read a command line.
        settings.append(f"-Dsmallrye.config.locations={write_registry_settings(state, port)}")
    arguments = [*settings, f"-Dquarkus.http.port={port}", "io.quarkus.runner.GeneratedMain"]
    return runtime.command(state, "registry", arguments)


def is_ready(log: Path, port: int, authority: Path | None = None) -> bool:
    """Returns whether the registry with this log answers. A port could be another process's.

    `authority` is the file of the authority of a secure stack. That registry must refuse who has
    no password.
    """
    protocol = "http" if authority is None else "https"
    if f"{protocol}://127.0.0.1:{port}".encode() not in log.read_bytes():
        return False
    expected, connection = http.HTTPStatus.OK, None
    try:
        if authority is None:
            connection = http.client.HTTPConnection(_HOST, port, timeout=_REQUEST_BOUND_S)
        else:
            expected, context = (
                http.HTTPStatus.UNAUTHORIZED,
                ssl.create_default_context(cafile=authority),
            )
            connection = http.client.HTTPSConnection(
                _HOST, port, timeout=_REQUEST_BOUND_S, context=context
            )
        connection.request("GET", f"{PATH}/subjects")
        return connection.getresponse().status == expected
    except (OSError, http.client.HTTPException):
        return False
    finally:
        if connection is not None:
            connection.close()
