"""Facts of a model folder's tokenizer that need no tokenizer library: ids and digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from headrace.errors import UsageError


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 of the folder's `tokenizer.json`, as hex: two equal ones give the same ids."""
    return hashlib.sha256(_read(folder / "tokenizer.json")).hexdigest()


def token_ids(folder: Path, spellings: Sequence[str]) -> list[int]:
    """The ids of tokens as the tokenizer spells them. UsageError names one that it lacks."""
    tree = json.loads(_read(folder / "tokenizer.json"))
    vocabulary = tree["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: [token, score] by id
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    vocabulary |= {token["content"]: token["id"] for token in tree.get("added_tokens", ())}
    missing = [spelling for spelling in spellings if spelling not in vocabulary]
    if missing:
        raise UsageError(f"{folder}: the tokenizer has no token {missing[0]!r}")
    return [vocabulary[spelling] for spelling in spellings]


def end_ids(folder: Path) -> list[int]:
    """The ids that end a generation, by the model's `config.json`; none where it names none."""
    end = json.loads(_read(folder / "config.json")).get("eos_token_id")
    if end is None:
        return []
    return list(end) if isinstance(end, list) else [end]


class Spells(Protocol):
    """What knows its tokens: a Tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text."""

    def token_id(self, spelling: str) -> int | None:
        """Returns the id of the token that is spelled so, or None."""


def single_ids(tokenizer: Spells, texts: Sequence[str]) -> tuple[int, ...]:
    """The tokens that stop texts are. ValueError where one is more than a token."""
    ids: list[int] = []
    for text in texts:
        token = tokenizer.token_id(text)
        spelled = [token] if token is not None else tokenizer.encode(text)
        if len(spelled) != 1:
            raise ValueError(f"stop text {text!r} is {len(spelled)} tokens; it must be one")
        ids += spelled
    return tuple(ids)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from error
