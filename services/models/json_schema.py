"""JSON schemas as masks over a vocabulary: which ids may come next, token by token.

Engines draw under these masks, and the trainer computes logprobs under the same ones: so what was
drawn by a schema can be trained on exactly. By xgrammar (Dong et al. 2024, arXiv 2411.15100).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.errors import UsageError
from headrace.services.models.tokens import end_ids

MAX_SCHEMA = 65_536
"""Most characters of a schema."""
CACHE_BYTES = 64 << 20
"""Of compiled schemas."""


class Schemas:
    """Compiles JSON schemas for one model. One thread at a time may compile."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """UsageError where the library is not installed, or the folder's tokenizer is none."""
        try:
            import xgrammar
            from transformers import PreTrainedTokenizerFast
        except ImportError as error:
            raise UsageError(
                "answers by a JSON schema need the extra: pip install 'headrace[structured]'"
            ) from error
        self._library: Any = xgrammar
        self.vocabulary = vocabulary
        make: Any = PreTrainedTokenizerFast
        self._tokenizer = make(tokenizer_file=str(folder / "tokenizer.json"))
        information = xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer, vocab_size=vocabulary, stop_token_ids=end_ids(folder)
        )
        self._compiler = xgrammar.GrammarCompiler(
            information, max_threads=1, cache_limit_bytes=CACHE_BYTES
        )

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def token_id(self, spelling: str) -> int | None:
        """The id of one token as the vocabulary spells it; None where it has no such token."""
        found: int | None = self._tokenizer.backend_tokenizer.token_to_id(spelling)
        return found

    def begin(
        self, schema: str, stop_ids: Sequence[int], around: tuple[str, str] = ("", "")
    ) -> GrammarState:
        """The beginning of a text by `schema`, which one of `stop_ids` ends.

        `around` is spelled before the JSON and after it, as it is.

        JSON is written as `json.dumps` does, a space after comma and colon and none besides; but
        whole objects that an `enum` or `const` has are without any. Properties come in the schema's
        order.
        ValueError where it is no JSON schema that can be followed: it says why.
        """
        length = len(schema) + sum(map(len, around))
        if length > MAX_SCHEMA:
            raise ValueError(f"json_schema: {length} characters, at most {MAX_SCHEMA} are read")
        if not stop_ids:
            raise ValueError("json_schema: the sampling needs a stop token, to end with")
        try:
            compiled = self._compile(schema, around)
        except RuntimeError as error:  # so the library calls whatever it can't compile
            raise ValueError(f"json_schema: {str(error).rpartition(': ')[2].strip()}") from error
        matcher = self._library.GrammarMatcher(compiled, override_stop_tokens=list(stop_ids))
        grammar = GrammarState(self._library, matcher, self.vocabulary)
        if not grammar.allowed().any():
            raise ValueError("json_schema: no text follows it")
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
    """One text in the making."""

    def __init__(self, library: Any, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._words: Tensor = library.allocate_token_bitmask(1, vocabulary)

    def allowed(self) -> Tensor:
        """[V] bool: the ids that may come next. After the end, all."""
        if self._matcher.is_terminated():
            return torch.ones(self._vocabulary, dtype=torch.bool)
        self._matcher.fill_next_token_bitmask(self._words, 0)
        bits = (self._words[0].unsqueeze(1) >> torch.arange(32, dtype=torch.int32)) & 1
        return bits.flatten()[: self._vocabulary].bool()

    def accept(self, token: int) -> None:
        """Takes the next token. ValueError where it may not come next."""
        if not self._matcher.is_terminated() and not self._matcher.accept_token(token):
            raise ValueError(f"token {token} does not follow the JSON schema")


def masked(logits: Tensor, grammars: Sequence[GrammarState | None]) -> Tensor:
    """Logits [n, V or more] with what each row's walk forbids at -inf; None forbids nothing."""
    if not any(grammars):
        return logits
    for row, grammar in enumerate(grammars):
        if grammar is not None:
            allowed = grammar.allowed().to(logits.device)
            logits[row, : len(allowed)].masked_fill_(~allowed, -torch.inf)
            logits[row, len(allowed) :] = -torch.inf
    return logits
