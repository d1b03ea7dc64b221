"""The keys of a recipe's tables and the options of plug-ins, as people write them in TOML.

Everything comes from the code: types and defaults from fields and signatures, meanings from the
docstrings below fields, or from the part `Options:` of a function's docstring.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.schemas.attribute_docs import attribute_docs
from headrace.schemas.recipe.tables import Settings

UNITS = {
    "_per_s": "per second",
    "_s": "seconds",
    "seconds": "seconds",
    "_ms": "milliseconds",
    "_kb": "KiB",
    "_mb": "MiB",
    "_tokens": "tokens",
}
"""Units of numbers, by the end of their key."""
REQUIRED = inspect.Parameter.empty
"""The default of a key without one."""

_NAMES = ((Any, "value"), (str, "string"), (bool, "boolean"), (int, "integer"), (float, "number"))
_BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
"""Attributes of constraints, and how people write them."""
_OPTION = re.compile(r"    (\w+): (.+)")
_ERRORS = re.compile(r"\s*\bRaises [A-Z]\w+ [^.]*\.(?=\s|$)")


class UndocumentedOption(ValueError):
    """An option has no meaning, or a docstring explains one that doesn't exist."""


class Key(NamedTuple):
    """A key of a table, or an option."""

    name: str
    kind: str
    """Its type, bounds and unit, for example `integer > 0, seconds`."""
    default: Any
    """REQUIRED if it has none, and None if it is absent by default."""
    meaning: str


class InnerTable(NamedTuple):
    """The table that a key holds."""

    kind: type[Settings]
    many: bool = False
    """Whether the key holds such tables by names of your own, as `agents` does."""


def keys_of(owner: Callable[..., Any], given: int = 0) -> list[Key]:
    """Returns the keys of a model or a dataclass, or the options of a function or another class.

    The first `given` parameters are not options. Raises UndocumentedOption if the docstrings don't
    explain exactly the options.
    """
    if inspect.isclass(owner) and (issubclass(owner, BaseModel) or dataclasses.is_dataclass(owner)):
        found = list(_fields(owner))
        tables = {name: table.kind for name, hint, _ in found if (table := table_of(hint))}
        docs = {name: about(kind) for name, kind in tables.items()} | attribute_docs(owner)
    else:
        function = inspect.getattr_static(owner, "__init__") if inspect.isclass(owner) else owner
        found, docs = list(_parameters(owner, function))[given:], _option_docs(function)
        if unknown := sorted(docs.keys() - {name for name, _, _ in found}):
            raise UndocumentedOption(f"the docstring of {owner} explains {unknown}: remove them")
    if missing := [name for name, _, _ in found if name not in docs]:
        raise UndocumentedOption(f"no docstring of {owner} explains {missing}: add them")
    return [Key(name, _kind(name, hint), default, docs[name]) for name, hint, default in found]


def table_of(hint: Any) -> InnerTable | None:
    """Returns the table of a key of this type, or None if the key holds a value."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType, Annotated):
        return next(filter(None, map(table_of, get_args(hint))), None)
    if origin is dict:
        inner = table_of(get_args(hint)[1])
        return None if inner is None else InnerTable(inner.kind, many=True)
    return InnerTable(hint) if inspect.isclass(hint) and issubclass(hint, Settings) else None


def about(owner: Any) -> str:
    """Returns the docstring of a plug-in as Markdown, without its options and errors."""
    text, _, _ = inspect.cleandoc(owner.__doc__ or "").partition("\n\nOptions:\n")
    return _ERRORS.sub("", text).strip()


def _fields(owner: type[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields the name, the type and the default of each field."""
    if issubclass(owner, BaseModel):
        for name, info in owner.model_fields.items():
            default = REQUIRED if info.is_required() else info.default
            yield name, Annotated[info.annotation, info], default
        return
    hints = typing.get_type_hints(owner, include_extras=True)
    for field in dataclasses.fields(owner):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield field.name, hints[field.name], REQUIRED if default is dataclasses.MISSING else default


def _parameters(owner: Callable[..., Any], function: Any) -> Iterator[tuple[str, Any, Any]]:
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(owner).parameters.items():
        yield name, hints[name], parameter.default


def _option_docs(function: Any) -> dict[str, str]:
    """Reads the part `Options:` of a docstring: `NAME: MEANING`, and indented further lines."""
    _, _, section = inspect.cleandoc(function.__doc__ or "").partition("Options:\n")
    docs: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if begun := _OPTION.fullmatch(line):
            name, docs[begun[1]] = begun[1], begun[2]
        else:
            docs[name] += f" {line.strip()}"
    return docs


def _kind(name: str, hint: Any) -> str:
    kind = _type(hint)
    units = (unit for end, unit in UNITS.items() if name.endswith(end))
    if kind.startswith(("integer", "number")) and (unit := next(units, None)):
        return f"{kind}, {unit}"
    return kind


def _type(hint: Any) -> str:
    """Returns a type as people write it, with its bounds or its values."""
    for known, name in _NAMES:
        if hint is known:
            return name
    arguments = [part for part in get_args(hint) if part is not types.NoneType]
    match get_origin(hint):
        case origin if origin is Annotated:
            return " ".join((_type(arguments[0]), *_bounds(arguments[1:])))
        case origin if origin is Literal:
            return " or ".join(f'`"{value}"`' for value in arguments)
        case origin if origin in (Union, types.UnionType):
            return " or ".join(map(_type, arguments))
        case origin if inspect.isclass(origin) and issubclass(origin, Mapping):
            values = arguments[1]
            return "table" if values is Any or table_of(values) else f"table of {_several(values)}"
        case origin if inspect.isclass(origin) and issubclass(origin, Sequence):
            fixed = origin is tuple and arguments[-1] is not ...
            number = f"{len(arguments)} " if fixed else ""
            return f"array of {number}{_several(arguments[0])}"
    is_table = table_of(hint) is not None or issubclass(hint, BaseModel)
    assert is_table, f"{hint} has no name in TOML"
    return "table"


def _several(hint: Any) -> str:
    first, space, bounds = _type(hint).partition(" ")
    return f"{first}s{space}{bounds}"


def _bounds(metadata: Sequence[Any]) -> Iterator[str]:
    for each in metadata:
        if isinstance(each, FieldInfo):
            yield from _bounds(each.metadata)
        for bound, sign in _BOUNDS.items():
            if (limit := getattr(each, bound, None)) is not None:
                yield f"{sign} {limit}"
