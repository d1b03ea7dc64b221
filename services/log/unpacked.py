"""Unpacks packed fields and token ids. It raises nothing, since their writer may be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.packed import unpack_f32, unpack_i32
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.models.tokens import load_library, tokenizer_digest
from headrace.services.models.weights import model_folder


def ids_in(data: bytes) -> list[int]:
    """Unpacks an i32[]. Returns an empty list if `data` is not one."""
    return unpack_i32(data) if len(data) % 4 == 0 else []


def floats_in(data: bytes) -> list[float]:
    """Unpacks an f32[], rounded to 6 digits. Returns an empty list if `data` is not one."""
    return [round(one, 6) for one in unpack_f32(data)] if len(data) % 4 == 0 else []


def versions_in(data: bytes) -> list[int]:
    """Returns the distinct versions in a `spans` field, ascending."""
    return sorted(set(ids_in(data)[1::2]))


class Texts:
    """Decodes token ids with the tokenizers of a recipe's models, if this machine has them."""

    def __init__(self, recipe: Recipe) -> None:
        self._models = {name: policy.model for name, policy in recipe.policies.items()}
        self._tokenizers: dict[str, tuple[Any, str] | None] = {}

    def of(self, policy: str, ids: bytes, digest: str = "") -> str | None:
        """Decodes an i32[]. Returns None if this machine does not have the tokenizer.

        `digest` is the digest of the tokenizer that made the ids; empty if unknown.
        """
        return self.of_ids(policy, ids_in(ids), digest)

    def of_ids(self, policy: str, ids: Sequence[int], digest: str = "") -> str | None:
        """Decodes token ids as `of` does."""
        if policy not in self._tokenizers:
            self._tokenizers[policy] = self._load(policy)
        found = self._tokenizers[policy]
        if found is None or digest not in ("", found[1]):
            return None
        text: str = found[0].decode(list(ids), skip_special_tokens=False)
        return text

    def _load(self, policy: str) -> tuple[Any, str] | None:
        try:
            folder = model_folder(self._models.get(policy, ""))
            return load_library(folder), tokenizer_digest(folder)
        except UsageError:
            return None
