"""The messages between a worker and its child process, over their socket.

A frame consists of two lengths (4 bytes each, big-endian), a JSON header, and the Avro bytes of an
event, or none. Both ends are from the same build, so the schemas of the events need no registry.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from headrace.schemas.codec import Codec
from headrace.schemas.events import EVENTS, Event, Ref

_LENGTHS = struct.Struct(">II")
_SCHEMA_ID = struct.Struct(">xI")
"""The head of Confluent's framing: the byte 0, then the schema id."""

Kind = Literal["recipe", "ready", "start", "send", "sent", "answer", "cancel", "stop", "ended"]


@dataclass(frozen=True, slots=True)
class Frame:
    """One message.

    To the child: `recipe` (text: JSON), `start` (event, number: its attempt, at), `sent` (number,
    ref or text: why the event was too large), `answer` (event), `cancel` (text: why), `stop`.
    From the child: `ready`, `send` (number, event), `ended`.
    """

    kind: Kind
    run: int = -1
    """The number of the child's episode that it is about."""
    number: int = 0
    at: float = 0.0
    """When the episode was started, in seconds since the epoch."""
    text: str = ""
    ref: Ref | None = None
    event: Event | None = None


class FrameCodec:
    """Encodes and decodes frames. It is not thread-safe."""

    def __init__(self) -> None:
        self._codec = Codec()
        for schema_id, event_type in enumerate(EVENTS):
            self._codec.register(event_type, schema_id)

    def encode(self, frame: Frame) -> bytes:
        """Returns the bytes of a frame. Raises TooLarge if its event is too large."""
        header: dict[str, object] = {
            "kind": frame.kind,
            "run": frame.run,
            "number": frame.number,
            "at": frame.at,
            "text": frame.text,
        }
        if frame.ref is not None:
            header["ref"] = frame.ref.model_dump() | {"digest": frame.ref.digest.hex()}
        head = json.dumps(header).encode()
        body = b"" if frame.event is None else self._codec.encode(frame.event)
        return _LENGTHS.pack(len(head), len(body)) + head + body

    def read(self, take: Callable[[int], bytes]) -> Frame:
        """Reads the next frame. `take` returns exactly that many bytes, or raises EOFError."""
        head, body = _LENGTHS.unpack(take(_LENGTHS.size))
        return self._decode(take(head), take(body))

    async def read_async(self, reader: asyncio.StreamReader) -> Frame | None:
        """Reads the next frame. Returns None at the end."""
        try:
            head, body = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
            return self._decode(await reader.readexactly(head), await reader.readexactly(body))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def _decode(self, head: bytes, body: bytes) -> Frame:
        header = json.loads(head)
        if (ref := header.pop("ref", None)) is not None:
            header["ref"] = Ref(**ref | {"digest": bytes.fromhex(ref["digest"])})
        event = None
        if body:
            event = self._codec.decode(EVENTS[_SCHEMA_ID.unpack_from(body)[0]], body)
        return Frame(**header, event=event)
