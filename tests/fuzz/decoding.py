"""The decoder under hostile bytes: an event or a DecodeError, soon, in little memory."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from time import process_time

from headrace.errors import DecodeError
from headrace.schemas.codec import Codec
from headrace.schemas.events import EVENTS
from headrace.schemas.topics import MAX_RECORD_BYTES
from tests.fuzz.strange import any_event_type, strange_event, strange_value, varint

MOST_SECONDS = 1.0
"""Of CPU, for any one message."""
MOST_BYTES = 256 * 1024 * 1024
"""That the process may grow by, over all messages."""
LARGE_EVERY = 5_000
"""Messages between two of the largest size."""


@dataclass(frozen=True)
class Decoded:
    """What came of many messages."""

    messages: int
    events: int
    """That were decoded: damage may leave an event."""
    slowest_s: float
    grown_bytes: int


def fuzz_decoder(seed: int, messages: int) -> Decoded:
    """Decodes so many messages. Raises what the decoder should not have raised.

    AssertionError where one takes too long, or all of them too much memory.
    """
    chance = Random(seed)
    codec = Codec()
    for schema_id, event_type in enumerate(EVENTS, start=1):
        codec.register(event_type, schema_id)
    before, events, slowest_s = _peak_bytes(), 0, 0.0
    for number in range(messages):
        event_type = any_event_type(chance)
        valid = codec.encode(strange_event(chance, event_type))
        value = _large(chance, valid) if number % LARGE_EVERY == 0 else strange_value(chance, valid)
        began = process_time()
        with suppress(DecodeError):
            codec.decode(event_type, value)
            events += 1
        slowest_s = max(slowest_s, process_time() - began)
        assert slowest_s < MOST_SECONDS, f"message {number} of seed {seed} took {slowest_s:.2f} s"
    grown = _peak_bytes() - before
    assert grown < MOST_BYTES, f"seed {seed} took {grown / 2**20:.0f} MiB"
    return Decoded(messages, events, slowest_s, grown)


def _large(chance: Random, valid: bytes) -> bytes:
    """As much as a record may hold of what is small: items without content, behind some count."""
    body = valid[: chance.randrange(5, len(valid) + 1)] + varint(chance.choice((10**6, 2**40)))
    filling = chance.choice((b"\0", b"\2", b"\2\0", b"\0\0\2", chance.randbytes(7)))
    room = MAX_RECORD_BYTES - len(body)
    return body + (filling * (room // len(filling) + 1))[:room]


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
