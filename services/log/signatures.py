r"""Signatures of publications, so that weights count only if a known key has signed them.

If a recipe names `policies.NAME.signers`, a record of `policies` about this policy counts only if
its header `headrace_signature` is `ed25519:NUMBER:SIGNATURE`. NUMBER is decimal without leading
zeros, from 1 to 2^63 - 1. SIGNATURE is the base64 of an Ed25519 signature (RFC 8032), 64 bytes, by
one of the named keys, of these bytes:

    b"headrace.publication.v1\n" + TOPIC + b"\n" + NUMBER + b"\n" + VALUE

TOPIC is the topic's name on the broker, which contains the namespace. VALUE is the whole value of
the record as it is in Kafka, so that every field is signed, and no reader depends on how another
program would encode the fields.

The numbers of a policy's publications ascend. A record whose number is not above that of every
earlier signed record of its policy is a repetition, and does not count. So nobody can bring back an
older version by writing its record again.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter

from headrace.errors import DecodeError, UsageError
from headrace.schemas.events import Event, PolicyPublished
from headrace.schemas.topics import Topics
from headrace.schemas.untrusted.public_keys import key_bytes, key_text
from headrace.schemas.untrusted.trusted_keys import texts_in
from headrace.services.base import clock
from headrace.services.base.files import private
from headrace.services.base.redactor import REDACTOR
from headrace.services.kafka.broker import Outgoing, Record

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

HEADER = "headrace_signature"
KEY_VARIABLE = "HEADRACE_SIGNING_KEY"
"""Environment variable with the path of the file that holds the trainer's private key."""
MOST_HEADER_BYTES = 128
MOST_NUMBER = 2**63 - 1
MOST_KEY_FILE_BYTES = 16_384

_HEADER = re.compile(rb"ed25519:(?P<number>[1-9][0-9]{0,18}):(?P<signature>[A-Za-z0-9+/]{86}==)")

REFUSED = Counter(
    "headrace_publications_refused_total",
    "Records of `policies` that do not count, because no named key signed them or they repeat "
    "an earlier one.",
    ["policy"],
)


def signed_bytes(topic: str, number: int, value: bytes) -> bytes:
    """Returns the bytes that a signature signs."""
    return b"headrace.publication.v1\n" + f"{topic}\n{number}\n".encode() + value


class PublicationSigner:
    """Signs the publications of one policy with ascending numbers."""

    def __init__(self, key: Ed25519PrivateKey, newest: int = 0) -> None:
        self._key = key
        self.newest = newest
        """The highest number of the policy's publications so far; 0 if none counts."""

    def sign(self, record: Outgoing) -> Outgoing:
        """Returns a record with its signature.

        The number is the time in milliseconds, or one more than the number before. So it is also
        above the numbers of records that a predecessor signed but did not commit.
        """
        self.newest = max(self.newest + 1, int(clock.now() * 1000))
        signature = self._key.sign(signed_bytes(record.topic, self.newest, record.value))
        text = f"ed25519:{self.newest}:{base64.b64encode(signature).decode()}"
        return replace(record, headers=[*record.headers, (HEADER, text.encode())])


class SignedPublications:
    """Decides which publications of one namespace count, as far as signatures decide it."""

    def __init__(self, topics: Topics) -> None:
        self._signers = topics.signers
        self._orders: dict[str, NumberOrder] = {}

    def check(self, event: Event, record: Record) -> int:
        """Returns the number of a publication; 0 if the record needs no signature.

        Raises DecodeError if the record does not count, and UsageError if the package
        `cryptography` is missing.
        """
        if not isinstance(event, PolicyPublished) or event.policy not in self._signers:
            return 0
        try:
            number = verified_number(record, self._signers[event.policy])
            order = self._orders.setdefault(event.policy, NumberOrder())
            if order.repeats(record.offset, number):
                raise ValueError(f"an earlier one has its number {number} or a higher one")
        except ValueError as error:
            REFUSED.labels(event.policy).inc()
            raise DecodeError(
                f"version {event.version} of policy {event.policy!r} does not count: {error}. The "
                "version before it stays in use. If this is not your trainer, find out who may "
                "write this topic",
                record.value,
            ) from None
        return number


class NumberOrder:
    """Finds repetitions among the signed publications of one policy, in whatever order it sees
    them."""

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._numbers: list[int] = []
        """Of the records that count, by offset. Both lists ascend."""

    def repeats(self, offset: int, number: int) -> bool:
        """Adds a record. Returns whether an earlier one has the same number or a higher one."""
        at = bisect_left(self._offsets, offset)
        if at and self._numbers[at - 1] >= number:
            return True
        end = at
        while end < len(self._offsets) and self._numbers[end] <= number:
            end += 1
        self._offsets[at:end] = [offset]
        self._numbers[at:end] = [number]
        return False


def verified_number(record: Record, signers: Sequence[str]) -> int:
    """Returns the number of a signed record. Raises ValueError if none of these keys signed it."""
    headers = [value for name, value in record.headers if name == HEADER]
    if not headers:
        raise ValueError("it is not signed, and `signers` of the recipe names who must sign it")
    parts = _HEADER.fullmatch(headers[0]) if len(headers[0]) <= MOST_HEADER_BYTES else None
    if len(headers) > 1 or parts is None or int(parts["number"]) > MOST_NUMBER:
        raise ValueError(f"its header {HEADER} is not a signature")
    number, signature = int(parts["number"]), _decoded(parts["signature"])
    message = signed_bytes(record.partition.topic, number, record.value or b"")
    if not any(signed_by(signer, signature, message) for signer in signers):
        raise ValueError("none of the keys that `signers` of the recipe names has signed it")
    return number


def _decoded(text: bytes) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return b""


def signed_by(signer: str, signature: bytes, message: bytes) -> bool:
    """Whether a signature of a message is by this public key, in the text of a recipe.

    Raises UsageError if the package `cryptography` is missing.
    """
    invalid, _ = _cryptography()
    try:
        _public_key(signer).verify(signature, message)
    except (invalid, ValueError):
        return False
    return True


@lru_cache(maxsize=1_024)
def _public_key(signer: str) -> Ed25519PublicKey:
    key: Ed25519PublicKey = _cryptography()[1].from_public_bytes(key_bytes(signer))
    return key


def _cryptography() -> tuple[type[Exception], Any]:
    """Returns InvalidSignature and Ed25519PublicKey."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise UsageError(
            f"the recipe names keys, but signatures can't be verified: {error}. "
            "Run pip install 'headrace[signatures]'"
        ) from None
    return InvalidSignature, Ed25519PublicKey


def find_signer(topics: Topics, policy: str) -> PublicationSigner | None:
    """Returns what signs a policy's publications; None if the recipe names no `signers` for it.

    Raises UsageError if the private key can't be used, or is not of one of the signers.
    """
    signers = topics.signers.get(policy)
    if not signers:
        return None
    named = os.environ.get(KEY_VARIABLE)
    if not named:
        raise UsageError(
            f"policies.{policy}.signers names who signs, so the trainer needs a private key: set "
            f"{KEY_VARIABLE} to the path of its file. `headrace keys new FILE` makes one"
        )
    key = read_private_key(Path(named))
    own = public_text(key)
    if own not in signers:
        raise UsageError(
            f"policies.{policy}.signers does not name {own}, the public key of {named}: set "
            f"{KEY_VARIABLE} to the file of one of the named keys"
        )
    return PublicationSigner(key)


def public_text(key: Ed25519PrivateKey) -> str:
    """Returns the text of a private key's public key."""
    return key_text(key.public_key().public_bytes_raw())


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """Reads an Ed25519 key from a PEM file, which only this user may read.

    Raises UsageError, which says what is wrong with the file.
    """
    _cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            data = file.read(MOST_KEY_FILE_BYTES)
    except OSError as error:
        raise UsageError(f"can't read the private key {path}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.geteuid():
        raise UsageError(
            f"{path} holds a private key, but others may read or change it: make yourself its "
            f"owner, and run chmod 600 {path}"
        )
    REDACTOR.add("signing key", data.decode("ascii", "replace"))
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(
            f"{path} is not a PEM file with an Ed25519 private key without a password: "
            "`headrace keys new FILE` makes one"
        )
    return key


def write_private_key(path: Path) -> Ed25519PrivateKey:
    """Makes a key and writes it to a new PEM file, which only this user can read.

    Raises UsageError if the file exists or can't be written.
    """
    _cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    key = Ed25519PrivateKey.generate()
    data = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        with open(path, "xb", opener=private) as file:
            file.write(data)
    except FileExistsError:
        raise UsageError(
            f"{path} exists already, and may hold a key that is in use: name a new file"
        ) from None
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}") from error
    return key


def signers_of(recipe: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Returns the signers of each policy that has some, from the tree of a recorded recipe."""
    policies = recipe.get("policies")
    found = policies if isinstance(policies, Mapping) else {}
    return {
        name: keys
        for name, policy in found.items()
        if isinstance(policy, Mapping) and (keys := texts_in(policy.get("signers")))
    }
