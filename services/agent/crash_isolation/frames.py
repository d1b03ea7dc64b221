"""What a worker and its child process tell each other over their socket.

A frame is two lengths (4 bytes each, big-endian), a JSON header and an event's Avro bytes, or
none. Both ends are of one build, so the events' schemas need no registry.
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
"""Of Confluent's framing: the byte 0, then the id."""

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
    """Which of the child's episodes it is about."""
    number: int = 0
    at: float = 0.0
    """When the episode was started, in epoch seconds."""
    text: str = ""
    ref: Ref | None = None
    event: Event | None = None


class FrameCodec:
    """Frames to bytes and back. Not thread-safe."""

    def __init__(self) -> None:
        self._codec = Codec()
        for schema_id, event_type in enumerate(EVENTS):
            self._codec.register(event_type, schema_id)

    def encode(self, frame: Frame) -> bytes:
        """The bytes of a frame. TooLarge where its event is."""
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
        """The next frame. `take` gives exactly so many bytes, or raises EOFError."""
        head, body = _LENGTHS.unpack(take(_LENGTHS.size))
        return self._decode(take(head), take(body))

    async def read_async(self, reader: asyncio.StreamReader) -> Frame | None:
        """The next frame; None at the end."""
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
