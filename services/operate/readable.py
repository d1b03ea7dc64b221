"""Events for people: packed arrays as lists, digests as hex."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from headrace.schemas.packed import unpack_f32, unpack_i32

_FLOATS = frozenset({"advantages", "logprobs", "turn_rewards"})
_DIGESTS = frozenset({"digest", "recipe", "sha256", "state"})


def readable(part: BaseModel) -> dict[str, Any]:
    """An event as JSON values, field by field. What is no packed array comes as hex."""
    return {name: _readable(name, getattr(part, name)) for name in type(part).model_fields}


def _readable(name: str, value: Any) -> Any:
    if isinstance(value, BaseModel):
        return readable(value)
    if isinstance(value, tuple):
        return [_readable(name, item) for item in value]
    if isinstance(value, dict):
        return {key: _readable(name, item) for key, item in value.items()}
    if not isinstance(value, bytes):
        return value
    if name in _DIGESTS or len(value) % 4:
        return value.hex()
    if name in _FLOATS:
        # JSON has no NaN: it stands for "none was given".
        return [None if number != number else round(number, 6) for number in unpack_f32(value)]
    return unpack_i32(value)
