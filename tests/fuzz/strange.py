"""Strange events and damaged bytes, drawn from a seed."""

from __future__ import annotations

import math
import types
import typing
from random import Random
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from headrace.schemas.events import (
    EVENTS,
    I32,
    I64,
    N31,
    N63,
    Event,
    Fixed16,
    Fixed32,
    Millis,
    Version,
    Weight,
)

MOST_ITEMS = 3
MOST_DAMAGES = 6
_TEXTS = (
    "",
    "{}",
    "[]",
    "null",
    "NaN",
    "{",
    '{"action": 5}',
    "\0",
    "\ud7ff\u202e",
    "../../etc/passwd",
    "os:system",
    "builtins:eval",
    "!!python/object/apply:os.system [ls]",
    "cos\nsystem\n(S'true'\ntR.",
    "default",
    "policy",
    "reset",
    "1",
    "1.close",
    "-1",
    "9" * 30,
    "1.2.3",
    "x" * 300,
)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e308, -1e308, 1e-320, math.inf, -math.inf, math.nan)


def strange_event(chance: Random, event_type: type[Event]) -> Event:
    """An event that its schema allows, made of what is unusual, its own checks passed over.

    Small numbers are frequent, so that it often speaks of a task that there is.
    """
    made: Event = _model(chance, event_type)
    return made


def strange_value(chance: Random, valid: bytes) -> bytes:
    """Bytes for a record's value: `valid` damaged, cut or grown, or nothing that it ever was."""
    match chance.randrange(8):
        case 0:
            return chance.randbytes(chance.randrange(200))
        case 1:
            return valid[:5] + chance.randbytes(chance.randrange(200))
        case 2:
            return valid[: chance.randrange(len(valid) + 1)]
        case 3:
            return valid + chance.randbytes(chance.randrange(1, 20))
        case 4:
            place = chance.randrange(len(valid) + 1)
            return valid[:place] + varint(_integer(chance, 63)) + valid[place:]
        case _:
            return _damaged(chance, valid)


def varint(number: int) -> bytes:
    """Avro's long: zigzag, seven bits a byte."""
    left = (number << 1) ^ (number >> 63)
    digits = bytearray()
    while left > 0x7F:
        digits.append(left & 0x7F | 0x80)
        left >>= 7
    digits.append(left)
    return bytes(digits)


def any_event_type(chance: Random) -> type[Event]:
    """One of all."""
    return chance.choice(EVENTS)


def _damaged(chance: Random, valid: bytes) -> bytes:
    damaged = bytearray(valid)
    for _ in range(chance.randint(1, MOST_DAMAGES)):
        if damaged:
            damaged[chance.randrange(len(damaged))] = chance.choice(
                (0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256))
            )
    return bytes(damaged)


def _model(chance: Random, model: type[BaseModel]) -> Any:
    hints = _hints(model)
    fields = {}
    for name, field in model.model_fields.items():
        if field.is_required() or chance.random() < 0.6:
            fields[name] = _value(chance, hints[name])
    return model.model_construct(**fields)  # its checks are for the reader to make


_known_hints: dict[type[BaseModel], dict[str, Any]] = {}


def _hints(model: type[BaseModel]) -> dict[str, Any]:
    if model not in _known_hints:
        _known_hints[model] = typing.get_type_hints(model, include_extras=True)
    return _known_hints[model]


def _value(chance: Random, hint: Any) -> Any:
    if hint in (I32, I64, N31, N63, Millis, Version):
        number = _integer(chance, 31 if hint in (I32, N31) else 63)
        return max(0, number) if hint == Millis else number
    if hint in (Fixed16, Fixed32):
        return chance.randbytes(16 if hint == Fixed16 else 32)
    if hint == Weight:
        return chance.choice([1e-9, 0.5, 1.0, 1e6])
    if hint is float:
        return chance.choice(_FLOATS)
    if hint is bool:
        return chance.random() < 0.5
    if hint is str:
        return chance.choice(_TEXTS)
    if hint is bytes:
        return chance.randbytes(chance.choice((0, 1, 3, 4, 8, 12, 13, 40)))
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return _model(chance, hint)
    return _composed(chance, get_origin(hint), get_args(hint))


def _composed(chance: Random, origin: Any, arguments: tuple[Any, ...]) -> Any:
    if origin is Literal:
        return chance.choice(arguments)
    if origin in (Union, types.UnionType):
        return None if chance.random() < 0.4 else _value(chance, arguments[0])
    count = chance.randint(0, MOST_ITEMS)
    if origin is tuple:
        return tuple(_value(chance, arguments[0]) for _ in range(count))
    assert origin is dict
    return {chance.choice(_TEXTS): _value(chance, arguments[1]) for _ in range(count)}


def _integer(chance: Random, bits: int) -> int:
    largest = 2**bits - 1
    return chance.choice(
        (0, 1, 2, chance.randrange(48), -1, largest, -largest - 1, chance.getrandbits(bits - 1))
    )
