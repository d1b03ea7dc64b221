"""Reads and sets the quotas of principals: how much each may send, fetch and use of each broker.

librdkafka has no requests for that, so the client sends them that Faust uses. They are
`DescribeClientQuotas` and `AlterClientQuotas` of Kafka's protocol, in version 0 (KIP-546).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiokafka.client import AIOKafkaClient  # type: ignore[import-untyped]
from aiokafka.errors import KafkaError  # type: ignore[import-untyped]
from aiokafka.protocol.admin import DescribeClientQuotasRequest  # type: ignore[import-untyped]
from aiokafka.protocol.api import Request, RequestStruct, Response  # type: ignore[import-untyped]
from aiokafka.protocol.types import (  # type: ignore[import-untyped]
    Array,
    Boolean,
    Float64,
    Int16,
    Int32,
    Schema,
    String,
)

from headrace.errors import DependencyError
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.security.aiokafka_login import aiokafka_options

ANSWER_S = 15.0
_TEXT = String("utf-8")
_ENTITY = ("entity", Array(("entity_type", _TEXT), ("entity_name", _TEXT)))
_SPECIFIED = 2
"""The kind of a filter that every entity with a name fits."""


class _Answer(Response):  # type: ignore[misc]
    API_KEY, API_VERSION = 49, 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("entries", Array(("error_code", Int16), ("error_message", _TEXT), _ENTITY)),
    )


class _Alteration(RequestStruct):  # type: ignore[misc]
    API_KEY, API_VERSION = 49, 0
    RESPONSE_TYPE = _Answer
    SCHEMA = Schema(
        (
            "entries",
            Array(
                _ENTITY,
                ("ops", Array(("key", _TEXT), ("value", Float64), ("remove", Boolean))),
            ),
        ),
        ("validate_only", Boolean),
    )


class _AlterQuotas(Request[_Alteration]):  # type: ignore[misc]
    API_KEY = 49

    def __init__(self, entries: list[Any]) -> None:
        self._entries = entries

    def build(self, request_struct_class: Any) -> Any:
        return request_struct_class(self._entries, False)


async def read_quotas(settings: KafkaSettings) -> dict[str, dict[str, float]]:
    """Returns the quotas of all users that have some, in Kafka's words, such as
    `producer_byte_rate`. A user is a principal without `User:`. The empty text stands for the
    default of all users that have none.

    Raises DependencyError if no broker answers, or if this principal may not `DescribeConfigs` the
    cluster.
    """
    request = DescribeClientQuotasRequest([("user", _SPECIFIED, None)], True)
    async with _client(settings, "read", "DescribeConfigs") as send:
        answer = await send(request)
        _raise(answer.error_code, answer.error_message)
    return {entity[0][1] or "": dict(values) for entity, values in answer.entries}


async def change_quotas(
    settings: KafkaSettings, changes: Mapping[str, Mapping[str, float | None]]
) -> None:
    """Sets quotas of users; None removes one. What `changes` does not name stays.

    Raises DependencyError if no broker answers, or if this principal may not `AlterConfigs` the
    cluster.
    """
    entries = [
        ([("user", user)], [(key, value or 0.0, value is None) for key, value in keys.items()])
        for user, keys in changes.items()
    ]
    async with _client(settings, "set", "AlterConfigs") as send:
        answer = await send(_AlterQuotas(entries))
        for code, message, _ in answer.entries:
            _raise(code, message)


class _QuotaRefused(Exception):
    """The broker's answer is an error."""


def _raise(code: int, message: str | None) -> None:
    if code:
        raise _QuotaRefused(message or f"error {code}")


@asynccontextmanager
async def _client(settings: KafkaSettings, doing: str, right: str) -> AsyncIterator[Any]:
    """Yields a function that sends a request to a broker. The controller gets it from there."""
    servers = settings.bootstrap_servers
    options = aiokafka_options(settings.properties, "the client that sets quotas")
    client = AIOKafkaClient(
        bootstrap_servers=servers.split(","),
        client_id=settings.client_id,
        request_timeout_ms=round(ANSWER_S * 1_000),
        **options,
    )

    async def send(request: Any) -> Any:
        return await client.send(client.get_random_node(), request)

    try:
        async with asyncio.timeout(ANSWER_S):
            await client.bootstrap()
            yield send
    except (KafkaError, _QuotaRefused, TimeoutError) as error:
        raise DependencyError(
            f"can't {doing} the quotas at {servers}; only a principal with `{right}` on the "
            f"cluster may: {error or 'no answer in time'}"
        ) from error
    finally:
        await client.close()
