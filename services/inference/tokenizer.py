"""Turns text into token ids and back, with the `tokenizer.json` of a model's folder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path

from headrace.errors import UsageError
from headrace.services.inference.chat import ChatTemplate
from headrace.services.models.tokens import encode, single_ids


class Tokenizer:
    """The tokenizer of a model. It neither adds nor drops special tokens."""

    def __init__(self, folder: Path) -> None:
        """Raises UsageError if the folder has no usable `tokenizer.json`."""
        try:
            # Imported here because the library comes with the extra `torch`.
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise UsageError(
                "to tokenize, the package tokenizers is needed: pip install 'headrace[torch]'"
            ) from error
        try:
            self._library = Library.from_str((folder / "tokenizer.json").read_text("utf-8"))
        except Exception as error:
            # The library raises a plain Exception for any problem with the file.
            raise UsageError(f"{folder} has no usable tokenizer.json: {error}") from error
        self.chat = ChatTemplate(folder, self.encode).ids
        """Returns the ids that new messages add to a context, by the model's chat template."""
        self.stop_ids = lru_cache(maxsize=64)(partial(single_ids, self._library))
        """Returns the ids of a tuple of stop texts, as `single_ids` does."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens. Raises ValueError if it has no ids."""
        return encode(self._library, text)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, with special tokens. Ids outside the vocabulary are left out."""
        text: str = self._library.decode(list(ids), skip_special_tokens=False)
        return text
