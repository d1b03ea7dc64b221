r"""Signatures of requests, so that a task counts for a tenant only if the tenant's key signed it.

A record of `tasks`, `cancellations`, `quotas`, `limits` or `audit` may have the header
`headrace_request`, which is `KEY:SIGNATURE`. KEY is the public key as a recipe has it, `ed25519:`
and 44 characters. SIGNATURE is the base64 of an Ed25519 signature (RFC 8032), 64 bytes, of these
bytes:

    b"headrace.request.v1\n" + TOPIC + b"\n" + SHA-256 of VALUE

TOPIC is the topic's name on the broker, which contains the namespace. VALUE is the whole value of
the record as it is in Kafka, which contains the id of the task. So the signature counts for no
other topic, task or tenant, and for no namespace of another name. It does count in a later run of
the same name, and on another cluster: use new keys for each run.

A record that is written again has a valid signature. A second cancellation changes nothing. A task
is a duplicate if its first copy is among the newest `scheduler.duplicates_window` records of the
topic, forged ones included; an older task runs again. Of the limits of one tenant, or of one limit,
each counted one must be set later than those before it, as far as these are still in the topic,
which is compacted.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import DecodeError, UsageError
from headrace.schemas.events import (
    Event,
    LimitSet,
    OperationRecorded,
    QuotaSet,
    TaskCancelled,
    TaskSubmitted,
)
from headrace.schemas.topics import Topics
from headrace.schemas.untrusted.trusted_keys import TrustedKeys
from headrace.services.kafka.broker import Outgoing, Record
from headrace.services.log.signatures import (
    NumberOrder,
    public_text,
    read_private_key,
    signed_by,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

REQUEST_HEADER = "headrace_request"
REQUEST_KEY = "HEADRACE_REQUEST_KEY"
"""Environment variable with the path of the file that holds the private key of who asks."""
REQUESTS: tuple[type[Event], ...] = (
    TaskSubmitted,
    TaskCancelled,
    QuotaSet,
    LimitSet,
    OperationRecorded,
)
"""The events that are signed, if there is a key."""
MOST_REQUEST_HEADER_BYTES = 256

_HEADER = re.compile(
    rb"(?P<key>ed25519:[A-Za-z0-9+/]{43}=):(?P<signature>[A-Za-z0-9+/]{85}[AQgw]==)"
)


def request_bytes(topic: str, digest: bytes) -> bytes:
    """Returns the bytes that a signature signs. `digest` is the SHA-256 of the record's value."""
    return b"headrace.request.v1\n" + topic.encode() + b"\n" + digest


@dataclass(frozen=True, slots=True)
class RequestSignature:
    """A signature as a record has it. It may be false."""

    topic: str
    digest: bytes
    """SHA-256 of the record's value."""
    key: str
    """The public key that it claims to be by."""
    signature: bytes

    @classmethod
    def of(cls, record: Record) -> RequestSignature | None:
        """Returns the signature of a record; None if it has none, or several."""
        headers = [value for name, value in record.headers if name == REQUEST_HEADER]
        if len(headers) != 1 or len(headers[0]) > MOST_REQUEST_HEADER_BYTES:
            return None
        if (parts := _HEADER.fullmatch(headers[0])) is None:
            return None
        digest = hashlib.sha256(record.value or b"").digest()
        signature = base64.b64decode(parts["signature"])
        return cls(record.partition.topic, digest, parts["key"].decode(), signature)

    def proved(self, among: Collection[str]) -> str:
        """Returns the key that has signed the record, if it is one of these; else an empty text.

        Raises UsageError if the package `cryptography` is missing.
        """
        if self.key not in among:
            return ""
        message = request_bytes(self.topic, self.digest)
        return self.key if signed_by(self.key, self.signature, message) else ""


class RequestSigner:
    """Signs requests with a private key, which is read from its file when it is first needed."""

    def __init__(self, key: Path | Ed25519PrivateKey | None) -> None:
        """`key` is the key or its file. With None, nothing is signed."""
        self._given = key

    @classmethod
    def of_environment(cls, file: str | Path | None = None) -> RequestSigner:
        """Returns a signer with the key in `file`, or that HEADRACE_REQUEST_KEY names."""
        named = file or os.environ.get(REQUEST_KEY)
        return cls(Path(named) if named else None)

    @cached_property
    def _key(self) -> Ed25519PrivateKey | None:
        return read_private_key(self._given) if isinstance(self._given, Path) else self._given

    @cached_property
    def public_key(self) -> str:
        """The text of the public key; empty without a key. Raises UsageError for a wrong file."""
        return "" if self._key is None else public_text(self._key)

    def sign(self, record: Outgoing) -> Outgoing:
        """Returns a record with its signature, or as it is without a key."""
        if self._key is None:
            return record
        message = request_bytes(record.topic, hashlib.sha256(record.value).digest())
        text = base64.b64encode(self._key.sign(message)).decode()
        header = (REQUEST_HEADER, f"{self.public_key}:{text}".encode())
        return replace(record, headers=[*record.headers, header])

    def require(self, topics: Topics, events: Sequence[Event]) -> None:
        """Raises UsageError if one of these events needs the signature of another key."""
        for event in events:
            if why := self._lacks(topics.trusted, event):
                yours = f". Your key is {self.public_key}" if self.public_key else ""
                raise UsageError(f"{why}{yours}")

    def _lacks(self, trusted: TrustedKeys, event: Event) -> str:
        if isinstance(event, TaskSubmitted) and not trusted.is_open(event.tenant):
            why = trusted.refusal(event.tenant, self.public_key)
            return f"task {event.task_id[:80]!r}: {why}" if why else ""
        if not isinstance(event, QuotaSet | LimitSet) or not trusted.operators:
            return ""
        if self.public_key in trusted.operators:
            return ""
        return (
            "only an operator can change limits in this run (scheduler.operators). Set "
            f"{REQUEST_KEY} to the file of an operator's key"
        )


class SignedLimits:
    """Decides which changes of limits of one namespace count, as far as signatures decide it."""

    def __init__(self, topics: Topics) -> None:
        self._operators = topics.trusted.operators
        self._orders: dict[tuple[type[Event], bytes], NumberOrder] = {}

    def check(self, event: Event, record: Record, signature: RequestSignature | None) -> None:
        """Raises DecodeError if the recipe names operators, and this change is not theirs.

        It is not theirs, either, if it repeats an earlier one. Raises UsageError if the package
        `cryptography` is missing.
        """
        if not isinstance(event, QuotaSet | LimitSet) or not self._operators:
            return
        why = ""
        if signature is None or not signature.proved(self._operators):
            why = "no key of `scheduler.operators` has signed it"
        elif self._order(event).repeats(record.offset, event.set_at):
            why = "an earlier one was set at the same time or later, so it is a repetition"
        if why:
            raise DecodeError(f"{type(event).__name__} does not count: {why}", record.value)

    def _order(self, event: Event) -> NumberOrder:
        return self._orders.setdefault((type(event), event.key), NumberOrder())
