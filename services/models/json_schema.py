"""Turns JSON schemas into masks over a vocabulary: which ids may come next, token by token.

Engines draw under these masks and the trainer computes logprobs under the same masks, so training
on answers that follow a schema is exact. The masks come from xgrammar (Dong et al. 2024,
arXiv:2411.15100).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.errors import UsageError
from headrace.services.models.tokens import end_ids

MAX_SCHEMA = 65_536
"""Maximum characters of a schema and of the texts around it."""
CACHE_BYTES = 64 << 20
"""Memory for compiled schemas."""


class Schemas:
    """Compiles JSON schemas for one model. Only one thread at a time may use it."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """Raises UsageError if xgrammar is not installed. `folder` holds the model's tokenizer."""
        try:
            import xgrammar
            from transformers import PreTrainedTokenizerFast
        except ImportError as error:
            raise UsageError(
                "to follow a JSON schema, xgrammar is needed: pip install 'headrace[structured]'"
            ) from error
        self._library: Any = xgrammar
        self.vocabulary = vocabulary
        make: Any = PreTrainedTokenizerFast
        tokenizer = make(tokenizer_file=str(folder / "tokenizer.json"))
        self.tokenizer = tokenizer.backend_tokenizer
        """A `tokenizers.Tokenizer`."""
        information = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocabulary, stop_token_ids=end_ids(folder)
        )
        self._compiler = xgrammar.GrammarCompiler(
            information, max_threads=1, cache_limit_bytes=CACHE_BYTES
        )

    def begin(
        self, schema: str, stop_ids: Sequence[int], around: tuple[str, str] = ("", "")
    ) -> GrammarState:
        """Returns the state at the start of a text that follows `schema` and ends with a stop id.

        The text starts with `around[0]` and ends with `around[1]`, character by character.
        JSON is written as `json.dumps` writes it, with a space after each comma and colon and
        nowhere else. Objects inside an `enum` or `const` have no spaces. Properties come in the
        order of the schema. Raises ValueError with the reason if no text can follow the schema.
        """
        length = len(schema) + sum(map(len, around))
        if length > MAX_SCHEMA:
            raise ValueError(
                f"json_schema has {length} characters, but at most {MAX_SCHEMA} are allowed"
            )
        if not stop_ids:
            raise ValueError("json_schema needs a stop token in the sampling, to end the answer")
        try:
            compiled = self._compile(schema, around)
        except RuntimeError as error:  # the library's error if it can't compile a schema
            raise ValueError(f"json_schema: {str(error).rpartition(': ')[2].strip()}") from error
        matcher = self._library.GrammarMatcher(compiled, override_stop_tokens=list(stop_ids))
        grammar = GrammarState(self._library, matcher, self.vocabulary)
        if not grammar.allowed().any():
            raise ValueError("json_schema: no text can follow this schema")
        return grammar

    def _compile(self, schema: str, around: tuple[str, str]) -> Any:
        if not any(around):
            return self._compiler.compile_json_schema(schema, any_whitespace=False)
        make = self._library.Grammar
        before, after = ({"type": "const_string", "value": text} for text in around)
        return self._compiler.compile_grammar(
            make.concat(
                make.from_structural_tag({"type": "structural_tag", "format": before}),
                make.from_json_schema(schema, any_whitespace=False),
                make.from_structural_tag({"type": "structural_tag", "format": after}),
            )
        )


class GrammarState:
    """The grammar state of one text: which ids may come next."""

    def __init__(self, library: Any, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._words: Tensor = library.allocate_token_bitmask(1, vocabulary)

    def allowed(self) -> Tensor:
        """Returns the ids that may come next, [V] bool. After the end of the text, all of them."""
        if self._matcher.is_terminated():
            return torch.ones(self._vocabulary, dtype=torch.bool)
        self._matcher.fill_next_token_bitmask(self._words, 0)
        bits = (self._words[0].unsqueeze(1) >> torch.arange(32, dtype=torch.int32)) & 1
        return bits.flatten()[: self._vocabulary].bool()

    def packed(self) -> bytes:
        """Returns what `allowed` returns with 8 ids in a byte, the lowest first. The last 4 bytes
        may have some bits more, which are 0."""
        words = torch.full_like(self._words[0], -1)
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(self._words, 0)
            words.copy_(self._words[0])
        if self._vocabulary % 32:
            words[-1] &= (1 << self._vocabulary % 32) - 1
        return words.numpy().tobytes()

    def accept(self, token: int) -> None:
        """Advances by the next token. Raises ValueError if the token may not come next."""
        if not self._matcher.is_terminated() and not self._matcher.accept_token(token):
            raise ValueError(f"token {token} does not follow the JSON schema")


class Allows(Protocol):
    """A mask of one row, as a GrammarState has it."""

    def allowed(self) -> Tensor:
        """Returns the ids that may come next, [V] bool."""


def masked(logits: Tensor, grammars: Sequence[Allows | None]) -> Tensor:
    """Sets the logits [n, V or more] that a grammar state forbids to -inf, inside `logits`.

    Each row has its own state. A row whose state is None allows every id.
    """
    if not any(grammars):
        return logits
    for row, grammar in enumerate(grammars):
        if grammar is not None:
            allowed = grammar.allowed().to(logits.device)
            logits[row, : len(allowed)].masked_fill_(~allowed, -torch.inf)
            logits[row, len(allowed) :] = -torch.inf
    return logits
