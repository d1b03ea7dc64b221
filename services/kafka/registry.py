"""The schema registry, by Confluent's protocol (Apicurio's and Karapace's too)."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar

from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.common._httpx_compat import httpx
from confluent_kafka.schema_registry.error import SchemaRegistryError

from headrace.errors import DependencyError, HeadraceError, UsageError
from headrace.services.kafka.schema_registry import COMPATIBILITY, SchemaRegistry

REQUEST_S = 5.0
"""Bound of connecting, and of each wait for an answer."""
RETRIES = 2
RETRY_MS = 100
MAX_CACHED = 1_000
UNKNOWN_FOR_S = 10.0
"""An id that the registry does not know is asked for again after this: ids are given out still."""

_AVRO = (None, "AVRO")
_MAX_ID = 2**31
_NOT_JSON = (SchemaRegistryError.UNKNOWN, None)
"""Error codes of an answer that is no registry's: its URL is wrong, most likely."""
_PASSWORD = re.compile(r"//[^/@,]*@")

T = TypeVar("T")


class Registry(SchemaRegistry):
    """One registry. Safe to call from several threads."""

    def __init__(self, url: str) -> None:
        """`url` is its base, a path included where it has one, a user and password where it asks
        for them (`https://user:password@host/`); several with commas between are tried in turn.

        UsageError where it is no HTTP URL.
        """
        self._where = _PASSWORD.sub("//", url)
        try:
            self._client = SchemaRegistryClient(
                {
                    "url": url,
                    "timeout": REQUEST_S,
                    "max.retries": RETRIES,
                    "retries.wait.ms": RETRY_MS,
                    "retries.max.wait.ms": 10 * RETRY_MS,
                }
            )
        except (ValueError, TypeError, httpx.InvalidURL) as error:
            raise UsageError(
                f"{self._where!r} is no schema registry URL, as http://host:8081"
            ) from error
        self._lock = threading.Lock()
        self._cached: OrderedDict[int, tuple[str | None, float]] = OrderedDict()
        """Schema and the monotonic time until which it is good, by id."""

    def close(self) -> None:
        """Closes its connections."""
        self._client.close()

    def register(self, subject: str, avsc_text: str, compatibility: str = COMPATIBILITY) -> int:
        """As SchemaRegistry has it. The level comes first, so that the schema is held to it."""
        self._ask(
            lambda: self._client.set_compatibility(subject, compatibility),
            f"set the compatibility of subject {subject} to {compatibility}",
        )
        what = f"register the schema of subject {subject}"
        schema_id = self._ask(
            lambda: self._client.register_schema(subject, _schema(avsc_text)), what
        )
        if schema_id is None:
            raise DependencyError(f"the schema registry at {self._where} does not {what}")
        return schema_id

    def lookup(self, subject: str, avsc_text: str) -> int | None:
        """As SchemaRegistry has it."""
        found = self._ask(
            lambda: self._client.lookup_schema(subject, _schema(avsc_text)),
            f"look up subject {subject}",
        )
        return None if found is None else found.schema_id

    def schema(self, schema_id: int) -> str | None:
        """As SchemaRegistry has it. Answers from its cache where it can."""
        if not 0 <= schema_id < _MAX_ID:
            return None
        with self._lock:
            text, good_until = self._cached.get(schema_id, (None, 0.0))
            if time.monotonic() < good_until:
                self._cached.move_to_end(schema_id)
                return text
        found = self._ask(
            lambda: self._client.get_schema(schema_id), f"fetch the schema with id {schema_id}"
        )
        text = found.schema_str if found is not None and found.schema_type in _AVRO else None
        good_for_s = float("inf") if text is not None else UNKNOWN_FOR_S
        with self._lock:
            self._cached[schema_id] = (text, time.monotonic() + good_for_s)
            self._cached.move_to_end(schema_id)
            while len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
        return text

    def _ask(self, request: Callable[[], T], what: str) -> T | None:
        """The answer; None where the registry does not have what is asked for."""
        try:
            return request()
        except SchemaRegistryError as error:
            if error.http_status_code == HTTPStatus.NOT_FOUND and error.error_code not in _NOT_JSON:
                return None
            raise self._refusal(error, what) from error
        except httpx.HTTPError as error:
            raise DependencyError(
                f"can't {what}: no schema registry answers at {self._where}"
                f" ({type(error).__name__}: {error}): is it running there? See `headrace up`"
            ) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"can't {what}: what answers at {self._where} is no schema registry: mind the"
                " URL's path, as /apis/ccompat/v7 for Apicurio"
            ) from error

    def _refusal(self, error: SchemaRegistryError, what: str) -> HeadraceError:
        message = f"the schema registry at {self._where} can't {what}: {error}"
        status = error.http_status_code
        if error.error_code in _NOT_JSON and status == HTTPStatus.NOT_FOUND:
            return UsageError(f"{message}: mind the URL's path, as /apis/ccompat/v7 for Apicurio")
        if status == HTTPStatus.CONFLICT:
            return UsageError(
                f"{message}. Readers of earlier records would fail: give new fields a default,"
                " and leave the others' names and types as they are"
            )
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return UsageError(f"{message}: check the user and password in its URL")
        if status == HTTPStatus.UNPROCESSABLE_ENTITY:
            return UsageError(message)
        return DependencyError(message)


def _schema(avsc_text: str) -> Schema:
    # Apicurio takes the quotes off a default of "{}" and then finds the schema wrong (3.0.9,
    # `removeQuotedBrackets`): so the brace is written as JSON also lets it be.
    return Schema(avsc_text.replace('"{}"', '"\\u007b}"'), "AVRO")
