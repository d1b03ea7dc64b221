"""Reads the credentials of a role: properties of librdkafka, in a file.

A folder of credentials has a file `<role>.properties` for each role that this machine plays:
a service, `operator`, `redrive` and so on (`access_table.py` has all roles). A file has a line
`key=value` for each property. Empty lines and lines that begin with `#` mean nothing. Properties
that begin with `schema.registry.` are for the client of the registry.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from headrace.errors import UsageError
from headrace.services.base.files import known_to_all

logger = logging.getLogger(__name__)

OPERATOR = "operator"
"""The role of a command, unless it has another one."""
ADMINISTRATOR = "administrator"
"""Who may create ACLs. The table does not list it, because the brokers let it do everything."""
REGISTRY = "schema.registry."
"""Prefix of the properties for the client of the registry."""
MAX_BYTES = 256 * 1024
"""Size of the largest file: it may contain certificates as PEM."""


def parse_properties(texts: Iterable[str]) -> dict[str, str]:
    """Reads properties of librdkafka, each as `key=value`. Raises UsageError for any other text."""
    properties = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            # The text is not shown: it may be a part of a secret.
            known = f"{key!r}" if key.replace(".", "").isalpha() else "that was given"
            raise UsageError(f"the Kafka property {known} has no value: write key=value")
        properties[key.strip()] = value.strip()
    return properties


def file_of(credentials: Path, role: str) -> Path:
    """Returns the file of a role. `credentials` is the folder, or the one file of every role."""
    return credentials / f"{role}.properties" if credentials.is_dir() else credentials


def read_credentials(credentials: Path, role: str) -> dict[str, str]:
    r"""Returns the properties of a role. In a value, `\n` stands for the end of a line.

    Logs a warning if every user of the machine can read the file. Raises UsageError if the file is
    missing, or if its text is not properties.
    """
    path = file_of(credentials, role)
    try:
        with path.open("rb") as file:
            everybody = known_to_all(path, os.fstat(file.fileno()).st_mode)
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"can't read the credentials of {role} in {path}: {error.strerror}. Write the "
            f"properties of its principal there, or name another folder or file in "
            f"HEADRACE_CREDENTIALS"
        ) from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path} has more than {MAX_BYTES // 1024} KiB: is it a properties file?")
    if everybody:
        logger.warning("every user of this machine can read the credentials %s. chmod 600 it", path)
    try:
        lines = [line.strip() for line in data.decode().splitlines()]
        properties = parse_properties(line for line in lines if line and line[0] != "#")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return {key: value.replace("\\n", "\n") for key, value in properties.items()}
