"""Derives the Avro schema of each event from its pydantic model, including the docs.

This is a tool: no process imports it. `python -m headrace.schemas.derive --write` updates `avro/`,
and publishes new events as `released/<Event>.v1.avsc`. A published file never changes. If anything
but the docs of an event has changed since, `--release` publishes the next version.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.schemas.attribute_docs import attribute_docs
from headrace.schemas.codec import AVRO, NAMESPACE
from headrace.schemas.events import (
    EVENTS,
    I32,
    I64,
    N31,
    N63,
    Ending,
    Event,
    Fixed16,
    Fixed32,
    Millis,
    Version,
    Weight,
)

RELEASED = Path(__file__).parent / "released"
"""Every version that was ever published. A log may contain records of any of them."""

_PRIMITIVES: tuple[tuple[Any, Any], ...] = (
    (I32, "int"),
    (I64, "long"),
    (N31, "int"),
    (N63, "long"),
    (Version, "long"),
    (Millis, {"type": "long", "logicalType": "timestamp-millis"}),
    (Weight, "double"),
    (float, "double"),
    (bool, "boolean"),
    (str, "string"),
    (bytes, "bytes"),
)
_FIXED: tuple[tuple[Any, str, int], ...] = ((Fixed16, "Fixed16", 16), (Fixed32, "Fixed32", 32))
_PACKED = {
    "i32[]": "Packed little-endian int32 values",
    "f32[]": "Packed little-endian float32 values",
    "spans": (
        "Packed little-endian int32 pairs (index of the first token, policy version), one for each"
        " run of tokens that have the same version, with the first index 0"
    ),
}
"""The meaning of the short names of packed fields, for people who only read the `.avsc`."""
_SHARED = {
    "task": "The task's number: its offset in the topic `tasks`.",
    "sample": "Number of the sample within its task, from 0.",
    "source": "Name of the submitter of the task.",
    "task_id": "The submitter's id of the task. It is unique within the source.",
    "item_id": "Id of the data set item that the task is made from.",
    "epoch": "Number of the pass over the data set, from 0.",
    "tenant": "The tenant whose limits the task's episodes count against.",
    "purpose": "`evaluate`: no policy is trained on the task's trajectories.",
    "policy": "Name of the policy in the recipe.",
    "agent": "Key of the recipe's `agents`.",
    "environment": "The environment in use.",
    "sampling": "How the tokens are sampled.",
    "rewards": "Named components of the reward, for reports.",
    "ending": "How the episode ended.",
    "kv": "`mixed`: an older version of the weights computed part of the KV cache.",
    "trajectory": "The location of the sample's trajectory.",
}
"""Docs of fields that mean the same in every event, if they have no docstring of their own."""


class ChangedRelease(ValueError):
    """A published schema would change, so that records written with it would be misread."""


def derive(event_type: type[Event]) -> dict[str, Any]:
    """Returns an event's Avro schema. Each nested type is defined inline at its first use."""
    schema = _Derivation().record(event_type)
    assert isinstance(schema, dict)
    return {"type": "record", "name": schema["name"], "namespace": NAMESPACE} | schema


def text(schema: dict[str, Any]) -> str:
    """Returns the content of a schema's file."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def released(event_type: type[Event], folder: Path = RELEASED) -> list[Path]:
    """Returns the files of an event's published versions, oldest first."""
    files = folder.glob(f"{event_type.__name__}.v*.avsc")
    return sorted(files, key=lambda file: int(file.suffixes[-2].removeprefix(".v")))


def write(avro: Path = AVRO, folder: Path = RELEASED, *, release: bool = False) -> list[Path]:
    """Writes all schemas, publishes new ones, and returns the files it wrote.

    If an event differs from its last published version, `release` publishes the next version.
    Without `release` it raises ChangedRelease and writes nothing.
    """
    pending: dict[Path, str] = {}
    for event_type in EVENTS:
        name, schema = event_type.__name__, derive(event_type)
        pending[avro / f"{name}.avsc"] = text(schema)
        versions = released(event_type, folder)
        if versions and _meaning(json.loads(versions[-1].read_text())) == _meaning(schema):
            continue
        target = folder / f"{name}.v{len(versions) + 1}.avsc"
        if versions and not release:
            raise ChangedRelease(
                f"{name} differs from {versions[-1].name}, which is published and must not change."
                f" Undo the change, or publish {target.name} with --release"
            )
        pending[target] = text(schema)
    for file, content in pending.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return list(pending)


def _meaning(schema: Any) -> Any:
    """Returns a schema without its docs: a change of the docs needs no new version."""
    if isinstance(schema, dict):
        return {
            key: value if key == "default" else _meaning(value)
            for key, value in schema.items()
            if key != "doc"
        }
    return [_meaning(part) for part in schema] if isinstance(schema, list) else schema


class _Derivation:
    """Derives one schema. It remembers which named types it has already defined."""

    def __init__(self) -> None:
        self._defined: dict[str, Any] = {}

    def record(self, model: type[BaseModel]) -> Any:
        """Returns a model's record schema, or only its name if it is already defined."""
        hints = typing.get_type_hints(model, include_extras=True)
        docs = attribute_docs(model)
        fields = []
        for name, field in model.model_fields.items():
            entry: dict[str, Any] = {"name": name}
            if doc := docs.get(name) or _SHARED.get(name):
                entry["doc"] = _with_full_names(doc)
            entry["type"] = self._type(hints[name], model.__name__ + _camel(name))
            if not field.is_required():
                entry["default"] = _default(field)
            fields.append(entry)
        return self._named(
            model.__name__, {"type": "record", "doc": _record_doc(model), "fields": fields}
        )

    def _type(self, hint: Any, literal_name: str) -> Any:
        for alias, primitive in _PRIMITIVES:
            if hint == alias:
                return primitive
        for alias, name, size in _FIXED:
            if hint == alias:
                return self._named(name, {"type": "fixed", "size": size})
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            return self.record(hint)
        arguments = get_args(hint)
        match get_origin(hint):
            case origin if origin is Literal:
                name = "Ending" if hint == Ending else literal_name
                return self._named(name, {"type": "enum", "symbols": list(arguments)})
            case origin if origin in (Union, types.UnionType):
                (inner,) = (part for part in arguments if part is not types.NoneType)
                return ["null", self._type(inner, literal_name)]
            case origin if origin is tuple and arguments[1:] == (...,):
                return {"type": "array", "items": self._type(arguments[0], literal_name)}
            case origin if origin is dict and arguments[0] is str:
                return {"type": "map", "values": self._type(arguments[1], literal_name)}
        raise TypeError(f"{literal_name}: {hint} has no Avro type")

    def _named(self, name: str, schema: dict[str, Any]) -> Any:
        schema = {"type": schema["type"], "name": name} | schema
        if name not in self._defined:
            self._defined[name] = schema
            return schema
        if self._defined[name] != schema and schema["type"] != "record":
            raise TypeError(f"two types are called {name}")
        return name


def _record_doc(model: type[BaseModel]) -> str:
    paragraph, _, _ = inspect.cleandoc(model.__doc__ or "").partition("\n\n")
    return " ".join(paragraph.split())


def _with_full_names(doc: str) -> str:
    for short, meaning in _PACKED.items():
        if doc.startswith(short):
            return meaning + doc.removeprefix(short)
    return doc


def _default(field: FieldInfo) -> Any:
    default = field.get_default(call_default_factory=True)
    match default:
        case bytes():
            return default.decode("latin-1")
        case tuple():
            return list(default)
        case _:
            return default


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def main() -> int:
    """Runs the command line. The exit code is 1 if a published schema would change."""
    parser = argparse.ArgumentParser(prog="python -m headrace.schemas.derive", description=__doc__)
    parser.add_argument("--write", action="store_true", required=True, help="write the files")
    parser.add_argument("--release", action="store_true", help="publish the next versions")
    arguments = parser.parse_args()
    try:
        written = write(release=arguments.release)
    except ChangedRelease as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(str(file) for file in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
