"""Keeps text of tasks, tools and users from becoming control tokens, such as `<|im_start|>`.

A tokenizer turns the spelling of a control token into that token wherever it finds it. So a tool's
result that spells `<|im_end|>` could end its message and begin one of another role. With this
module, only the markup of the chat template becomes control tokens. These are the tokens in
`added_tokens` of `tokenizer.json` that are marked as special, and those that are not but occur in
the chat template, such as Qwen's `<tool_call>`. What a policy says (an assistant's message, or a
demonstration) may contain the latter, because a policy draws them itself.

How it works: before a template is rendered, a placeholder replaces each spelling in a content. The
spellings in the rendered text are then those of the markup. They become aliases, and the
placeholders become the original spellings again. A second tokenizer knows the control tokens by
their aliases alone and reads everything else as plain text. A text without placeholders takes none
of these steps, so its ids are those that the model's own tokenizer gives.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from functools import cached_property
from typing import Any

from headrace.services.models.tokens import encode


class ControlTokens:
    """The control tokens of one tokenizer."""

    def __init__(self, library: Any, template: str = "") -> None:
        """`library` is a `tokenizers.Tokenizer`, and `template` the text of the chat template."""
        from tokenizers import Tokenizer as Library
        from tokenizers.models import WordLevel

        self._library = library
        added = [
            token
            for token in library.get_added_tokens_decoder().values()
            if token.special or (token.content.strip() and token.content in template)
        ]
        self.special = frozenset(token.content for token in added if token.special)
        """The spellings of the tokens that are marked as special."""
        # No writer of a content can guess it.
        secret = secrets.token_hex(16)
        self._aliases = {one.content: f"<{secret}:{i}>" for i, one in enumerate(added)}
        self._secret = secret
        self._placeholder = re.compile(f"{secret}-([0-9a-f]*);")
        self._begins = {one.content[:end] for one in added for end in range(1, len(one.content))}
        """What may become a control token if a template appends another content."""
        self._longest = max((len(one.content) for one in added), default=1)
        self._finder = Library(WordLevel({"": 0}, unk_token=""))
        self._finder.normalizer = library.normalizer
        self._finder.add_tokens(added)

    def hide(self, content: str, *, said: bool = False) -> str:
        """Returns a content with placeholders for the control tokens that it spells.

        With `said` it is a text of the policy, which may contain those that are not special.
        Raises ValueError if the content is not valid Unicode.
        """

        def hidden(found: str, token: str) -> str:
            return found if said and token not in self.special else self._hidden(found)

        text = self._replace(content, hidden)
        end = len(text.rstrip())
        for begin in range(max(0, end - self._longest), end):
            if text[begin:end] in self._begins:
                return f"{text[:begin]}{self._hidden(text[begin:end])}{text[end:]}"
        return text

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, in which placeholders are plain text.

        Raises ValueError if it has none.
        """
        if self._secret not in text:
            return encode(self._library, text)
        parts = self._placeholder.split(text)
        parts[::2] = [self._replace(part, self._alias) for part in parts[::2]]
        parts[1::2] = [bytes.fromhex(part).decode() for part in parts[1::2]]
        library, originals = self._plain
        try:
            ids = encode(library, "".join(parts))
        except ValueError:
            # Its message has the aliases.
            raise ValueError(f"can't tokenize {self.shown(text)[:80]!r}") from None
        return [originals.get(token, token) for token in ids]

    def shown(self, text: str) -> str:
        """Returns a text for people, without placeholders and aliases, which must stay secret."""
        return self._placeholder.sub("…", text).replace(self._secret, "…")

    def _replace(self, text: str, replacement: Callable[[str, str], str]) -> str:
        """Replaces the control tokens in a text, as `replacement(what the text has, token)`."""
        try:
            found = self._finder.encode(text, add_special_tokens=False)
        except Exception as error:
            # The library raises a TypeError for text that is not valid Unicode.
            raise ValueError(f"can't tokenize {text[:80]!r}: {error}") from error
        if not any(found.ids):
            return text
        parts, end = [], 0
        for token, spelling, (begin, after) in zip(
            found.ids, found.tokens, found.offsets, strict=True
        ):
            if token:
                # The token may include the white space around it.
                has = text[begin:after]
                begin += len(has) - len(has.lstrip())
                after = begin + len(has.strip())
                parts += [text[end:begin], replacement(text[begin:after], spelling)]
                end = after
        return "".join([*parts, text[end:]])

    def _hidden(self, text: str) -> str:
        return f"{self._secret}-{text.encode().hex()};"

    def _alias(self, found: str, token: str) -> str:
        return self._aliases[token]

    @cached_property
    def _plain(self) -> tuple[Any, dict[int, int]]:
        """The tokenizer that knows control tokens by their aliases alone, and their real ids."""
        from tokenizers import Tokenizer as Library

        tree, aliases = json.loads(self._library.to_str()), self._aliases
        for token in tree["added_tokens"]:
            token["content"] = aliases.get(token["content"], token["content"])
        model = tree["model"]
        model["vocab"] = _renamed(model["vocab"], aliases)
        if "merges" in model:
            model["merges"] = [one for one in model["merges"] if not _makes(one, aliases)]
        if model.get("unk_token") in aliases:
            model["unk_token"] = aliases[model["unk_token"]]
        tree["post_processor"] = None
        library: Any = Library.from_str(json.dumps(tree))
        return library, {
            library.token_to_id(alias): self._library.token_to_id(content)
            for content, alias in aliases.items()
        }


def _renamed(vocabulary: Any, aliases: dict[str, str]) -> Any:
    """Returns the vocabulary of a model: a table of tokens, or a list of them with scores."""
    if isinstance(vocabulary, dict):
        return {aliases.get(token, token): index for token, index in vocabulary.items()}
    return [[aliases.get(token, token), score] for token, score in vocabulary]


def _makes(merge: Any, aliases: dict[str, str]) -> bool:
    """Whether a merge reads or gives a token that has an alias."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in aliases or right in aliases or left + right in aliases
