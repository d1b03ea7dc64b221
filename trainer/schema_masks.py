"""Recomputes the token masks of answers that had to follow a JSON schema."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.errors import UsageError
from headrace.schemas.events import Sampling
from headrace.schemas.packed import unpack_i32
from headrace.services.models.json_schema import Schemas
from headrace.services.models.tokens import single_ids
from headrace.trainer.sequences import Ints, UnusableBatch


class SchemaMasks:
    """Recomputes an engine's masks with the same library and the same tokenizer."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """`folder` has the model's tokenizer. It is read when the first schema is needed."""
        self._folder = folder
        self._vocabulary = vocabulary
        self._schemas: Schemas | None = None

    def of(self, sampling: Sampling, tokens: Ints) -> NDArray[np.bool_]:
        """Returns [N, V] bool: the ids that were allowed at each of an answer's N tokens.

        `tokens` is the whole answer. Raises UnusableBatch if the schema can't be followed or the
        tokens do not follow it.
        """
        try:
            if self._schemas is None:
                self._schemas = Schemas(self._folder, self._vocabulary)
            ends = (*unpack_i32(sampling.stop_ids), *single_ids(self._schemas, sampling.stop))
            around = sampling.json_before, sampling.json_after
            grammar = self._schemas.begin(sampling.json_schema, ends, around)
            masks = []
            for token in tokens.tolist():
                masks.append(grammar.allowed().numpy())
                grammar.accept(token)
        except (ValueError, UsageError) as error:
            raise UnusableBatch(
                f"the masks of an answer with a JSON schema can't be recomputed: {error}"
            ) from error
        return np.stack(masks)
