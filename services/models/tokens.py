"""Reads token ids and digests from a model folder, and tokenizes texts with a loaded tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.errors import UsageError


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 of the folder's `tokenizer.json`, in hex. Equal files give equal token ids."""
    return hashlib.sha256(_read(folder / "tokenizer.json")).hexdigest()


def token_ids(folder: Path, spellings: Sequence[str]) -> list[int]:
    """The ids of tokens, spelled as in the vocabulary. Raises UsageError if a token is missing."""
    vocabulary = _vocabulary(folder)
    missing = [spelling for spelling in spellings if spelling not in vocabulary]
    if missing:
        raise UsageError(
            f"{folder}: the tokenizer has no token {missing[0]!r}. Write single tokens, as its "
            "tokenizer.json spells them: byte-level ones spell a space as Ġ and a line feed as Ċ"
        )
    return [vocabulary[spelling] for spelling in spellings]


def same_vocabulary(one: Path, other: Path) -> bool:
    """Whether the tokens of two tokenizers have the same ids. Raises UsageError if one is absent.

    Other settings of the files may differ, as they often do between the sizes of a model.
    """
    return tokenizer_digest(one) == tokenizer_digest(other) or _vocabulary(one) == _vocabulary(
        other
    )


def _vocabulary(folder: Path) -> dict[str, int]:
    tree = json.loads(_read(folder / "tokenizer.json"))
    vocabulary = tree["model"]["vocab"]
    if isinstance(vocabulary, list):  # a Unigram model lists [token, score] by id
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    added = {token["content"]: token["id"] for token in tree.get("added_tokens", ())}
    return {**vocabulary, **added}


def end_ids(folder: Path) -> list[int]:
    """The ids that end a generation, from the model's `config.json`. May be empty."""
    end = json.loads(_read(folder / "config.json")).get("eos_token_id")
    if end is None:
        return []
    return list(end) if isinstance(end, list) else [end]


def load_library(folder: Path) -> Any:
    """Returns the folder's tokenizer as a `tokenizers.Tokenizer`.

    Raises UsageError if the folder has no usable `tokenizer.json`, or the package is missing.
    """
    try:
        # Imported here because the library comes with the extra `torch`.
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UsageError(
            "to tokenize, the package tokenizers is needed: pip install 'headrace[torch]'"
        ) from error
    try:
        return Tokenizer.from_str((folder / "tokenizer.json").read_text("utf-8"))
    except Exception as error:
        # The library raises a plain Exception for any problem with the file.
        raise UsageError(f"{folder} has no usable tokenizer.json: {error}") from error


def encode(library: Any, text: str) -> list[int]:
    """Returns the ids of a text, without special tokens. Raises ValueError if it has no ids.

    `library` is a `tokenizers.Tokenizer`.
    """
    try:
        ids: list[int] = library.encode(text, add_special_tokens=False).ids
    except Exception as error:
        # The library raises a plain Exception, for example for a word outside the vocabulary.
        raise ValueError(f"can't tokenize {text[:80]!r}: {error}") from error
    return ids


def single_ids(library: Any, texts: Sequence[str]) -> tuple[int, ...]:
    """The token id of each stop text. Raises ValueError if a text is not exactly one token.

    `library` is a `tokenizers.Tokenizer`.
    """
    ids: list[int] = []
    for text in texts:
        token = library.token_to_id(text)
        spelled = [token] if token is not None else encode(library, text)
        if len(spelled) != 1:
            raise ValueError(f"stop text {text!r} has {len(spelled)} tokens, but must be one token")
        ids += spelled
    return tuple(ids)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from error
