"""What tables of settings have in common: they refuse what they don't know, and say so."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
PositiveSeconds = Annotated[float, Field(gt=0)]


class RecipeError(ValueError):
    """The recipe can't be used. The message names each wrong key and what is expected there."""


class Settings(BaseModel):
    """Settings refuse keys they don't know, and NaN and infinity, which JSON can't carry."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PlugIn(Settings):
    """A built-in by name, or the user's own by import path `package.module:name`."""

    use: str
    options: dict[str, Any] = {}
    """Keyword arguments of the plug-in."""


def explain(error: ValidationError) -> str:
    """Each wrong key, and what is expected there."""
    lines = []
    for problem in error.errors(include_url=False):
        key = ".".join(str(part) for part in problem["loc"]) or "the recipe"
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = "no such key"
        lines.append(f"{key}: {message}")
    return "; ".join(lines)
