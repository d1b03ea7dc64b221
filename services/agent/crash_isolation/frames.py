"""What a worker and its child process tell each other.

A frame is a line of JSON; an event in it is Avro, in base64. Both ends run the same code, so the
schemas of the events need no registry.
"""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import dataclass
from typing import Literal

from headrace.schemas.codec import Codec
from headrace.schemas.events import EVENTS, Event, Ref
from headrace.schemas.topics import MAX_RECORD_BYTES

_SCHEMA_ID = struct.Struct(">xI")
"""The head of Confluent's framing: the byte 0, then the schema id."""
LIMIT = 2 * MAX_RECORD_BYTES
"""Maximum number of bytes of a frame. Base64 makes an event a third larger."""

Kind = Literal["recipe", "ready", "start", "send", "sent", "answer", "cancel", "stop", "ended"]


@dataclass(frozen=True)
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
        ref, event = frame.ref, frame.event
        tree = vars(frame) | {
            "ref": ref and ref.model_dump() | {"digest": ref.digest.hex()},
            "event": event and base64.b64encode(self._codec.encode(event)).decode(),
        }
        return json.dumps(tree).encode()

    def decode(self, line: bytes) -> Frame:
        """The frame of these bytes."""
        tree = json.loads(line)
        if (ref := tree["ref"]) is not None:
            tree["ref"] = Ref(**ref | {"digest": bytes.fromhex(ref["digest"])})
        if tree["event"] is not None:
            value = base64.b64decode(tree["event"])
            tree["event"] = self._codec.decode(EVENTS[_SCHEMA_ID.unpack_from(value)[0]], value)
        return Frame(**tree)
