"""Text to token ids and back, by a model folder's `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.errors import UsageError
from headrace.services.inference.chat import ChatTemplate


class Tokenizer:
    """A `tokenizer.json` as it is: it adds no special tokens, and drops none."""

    def __init__(self, folder: Path) -> None:
        """UsageError where the folder has no usable `tokenizer.json`."""
        try:
            # Imported here: the library comes with the extra `torch`, and few processes need it.
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise UsageError("tokenizing needs the extra: pip install 'headrace[torch]'") from error
        try:
            self._library = Library.from_str((folder / "tokenizer.json").read_text("utf-8"))
        except Exception as error:
            # The library raises bare Exception for whatever is wrong with the file.
            raise UsageError(f"{folder} has no usable tokenizer.json: {error}") from error
        self._chat = ChatTemplate(folder, self.encode)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around it. ValueError where it has none."""
        try:
            ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        except Exception as error:
            # The library raises bare Exception, as for an unknown word without a token for it.
            raise ValueError(f"can't tokenize {text[:80]!r}: {error}") from error
        return ids

    def chat(self, chat: str, context: Sequence[int]) -> list[int]:
        """The ids that new messages add to a context, by the model's own template.

        ValueError where it has none, or can't render them. See `chat.py`.
        """
        return self._chat.ids(chat, context)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens spelled out. Ids that it doesn't know are left out."""
        text: str = self._library.decode(list(ids), skip_special_tokens=False)
        return text

    def token_id(self, spelling: str) -> int | None:
        """The id of one token as the vocabulary spells it; None where it has no such token."""
        found: int | None = self._library.token_to_id(spelling)
        return found
