"""A client of schema registries with Confluent's protocol, such as Apicurio and Karapace."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import TypeVar

from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.common._httpx_compat import httpx
from confluent_kafka.schema_registry.error import SchemaRegistryError

from headrace.errors import DependencyError, HeadraceError, UsageError
from headrace.services.kafka.schema_registry import COMPATIBILITY, SchemaRegistry

REQUEST_S = 5.0
"""The limit for connecting, and for each wait for an answer."""
RETRIES = 2
RETRY_MS = 100
SETTINGS = (
    "basic.auth.user.info",
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.key.location",
    "ssl.key.password",
)
"""What a user may set of the client, mostly to authenticate: `USER:PASSWORD`, and paths of files in
PEM."""
MAX_UNKNOWN = 1_000
UNKNOWN_FOR_S = 10.0
"""An id that the registry does not have is requested again after this: it may be assigned later."""

_AVRO = (None, "AVRO")
_MAX_ID = 2**31
_NOT_JSON = (SchemaRegistryError.UNKNOWN, None)
"""Error codes of an answer that did not come from a registry. Most likely the URL is wrong."""
_CHECK_PATH = "Check the path of the URL; Apicurio's is /apis/ccompat/v7"
_PASSWORD = re.compile(r"//(?:(?!https?://).)*@")
"""It may have characters that no URL can have there, in a URL that is refused."""

T = TypeVar("T")


class Registry(SchemaRegistry):
    """A client of one registry. Safe to call from several threads."""

    def __init__(
        self,
        url: str,
        known: Mapping[str, int] | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """`url` is the base URL; several URLs, separated by commas, are tried in turn.

        It has a path, a user and a password (`https://user:password@host/`) if the registry needs
        them. `known` is what another client of this registry has `known`. `properties` are more
        settings of the client, one of `SETTINGS` each.

        Raises UsageError if it is not an HTTP URL, or if a property is not known or names a file
        that can't be used.
        """
        self._url = _PASSWORD.sub("//", url)
        settings = dict(properties or {})
        if unknown := sorted(settings.keys() - SETTINGS):
            raise UsageError(
                f"the property schema.registry.{unknown[0]} is not known. Use one of "
                f"{', '.join(SETTINGS)}, each after schema.registry."
            )
        try:
            for one in map(httpx.URL, url.split(",")):
                if b"@" in one.raw_path or "@" in one.fragment:
                    raise ValueError("a part of the password is not where a password is")
            self._client = SchemaRegistryClient(
                settings
                | {
                    "url": url,
                    "timeout": REQUEST_S,
                    "max.retries": RETRIES,
                    "retries.wait.ms": RETRY_MS,
                    "retries.max.wait.ms": 10 * RETRY_MS,
                }
            )
        except OSError as error:
            raise UsageError(
                f"the files of TLS for the registry at {self._url} can't be used: {error}. Check "
                f"the paths in schema.registry.ssl.ca.location, .certificate.location and "
                f".key.location"
            ) from error
        except (ValueError, TypeError, httpx.InvalidURL) as error:
            raise UsageError(
                f"{self._url!r} is not the URL of a schema registry. Write it like http://host:8081,"
                " and special characters of a password like in %2F for /"
            ) from error
        self.known: dict[str, int] = dict(known or {})
        """Ids that the registry has assigned, by a digest of the subject and the schema. They never
        change, so they are not requested again."""
        self._unknown: dict[int, float] = {}
        """By id: the monotonic time until which it is not requested. The client caches the rest."""

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def register(self, subject: str, avsc_text: str) -> int:
        # The compatibility level goes first, so that the registry checks the schema against it.
        self._ask(
            lambda: self._client.set_compatibility(subject, COMPATIBILITY),
            f"set the compatibility of subject {subject} to {COMPATIBILITY}",
        )
        what = f"register the schema of subject {subject}"
        schema_id = self._ask(
            lambda: self._client.register_schema(subject, _schema(avsc_text)), what
        )
        if schema_id is None:
            raise DependencyError(f"the schema registry at {self._url} did not {what}")
        self.known[_key(subject, avsc_text)] = schema_id
        return schema_id

    def lookup(self, subject: str, avsc_text: str) -> int | None:
        key = _key(subject, avsc_text)
        if key not in self.known:
            found = self._ask(
                lambda: self._client.lookup_schema(subject, _schema(avsc_text)),
                f"look up subject {subject}",
            )
            if found is None or found.schema_id is None:
                return None
            self.known[key] = found.schema_id
        return self.known[key]

    def schema(self, schema_id: int) -> str | None:
        if not 0 <= schema_id < _MAX_ID or time.monotonic() < self._unknown.get(schema_id, 0.0):
            return None
        found = self._ask(
            lambda: self._client.get_schema(schema_id), f"fetch the schema with id {schema_id}"
        )
        if found is not None and found.schema_type in _AVRO:
            return found.schema_str
        if len(self._unknown) >= MAX_UNKNOWN:
            self._unknown.clear()
        self._unknown[schema_id] = time.monotonic() + UNKNOWN_FOR_S
        return None

    def _ask(self, request: Callable[[], T], what: str) -> T | None:
        """The answer, or None if the registry does not have what is requested."""
        try:
            return request()
        except SchemaRegistryError as error:
            if error.http_status_code == HTTPStatus.NOT_FOUND and error.error_code not in _NOT_JSON:
                return None
            raise self._refusal(error, what) from error
        except httpx.HTTPError as error:
            raise DependencyError(
                f"can't {what}: no schema registry answers at {self._url}"
                f" ({type(error).__name__}: {error}). Is it running? See `headrace up`"
            ) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"can't {what}: {self._url} did not answer like a schema registry. {_CHECK_PATH}"
            ) from error

    def _refusal(self, error: SchemaRegistryError, what: str) -> HeadraceError:
        message = f"the schema registry at {self._url} can't {what}: {error}"
        status = error.http_status_code
        if status == HTTPStatus.NOT_FOUND:
            return UsageError(f"{message}. {_CHECK_PATH}")
        if status == HTTPStatus.CONFLICT:
            return UsageError(
                f"{message}. Readers of earlier records would fail: give new fields a default, and"
                " do not change the names and types of the others"
            )
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return UsageError(f"{message}. Check the user and password in its URL")
        if status == HTTPStatus.UNPROCESSABLE_ENTITY:
            return UsageError(message)
        return DependencyError(message)


def _key(subject: str, avsc_text: str) -> str:
    return hashlib.sha256(f"{subject}\n{avsc_text}".encode()).hexdigest()[:16]


def _schema(avsc_text: str) -> Schema:
    # Apicurio removes the quotes of a default of "{}" and then rejects the schema (3.0.9,
    # `removeQuotedBrackets`), so the brace is escaped.
    return Schema(avsc_text.replace('"{}"', '"\\u007b}"'), "AVRO")
