"""The masks that tokens were drawn under where their text had to follow a JSON schema."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.errors import UsageError
from headrace.schemas.packed import unpack_i32
from headrace.services.models.json_schema import Schemas
from headrace.services.models.tokens import single_ids
from headrace.trainer.sequences import Draw, Ints, UnusableBatch


class SchemaMasks:
    """Computes anew what an engine did, by the same library and the same tokenizer."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """`folder` has the model's tokenizer. Nothing is read before the first schema comes."""
        self._folder = folder
        self._vocabulary = vocabulary
        self._schemas: Schemas | None = None

    def of(self, draw: Draw, tokens: Ints) -> NDArray[np.bool_]:
        """[N, V]: what might have been drawn in each token's place, of a whole answer's N tokens.

        UnusableBatch where the schema can't be followed, or the tokens don't.
        """
        try:
            if self._schemas is None:
                self._schemas = Schemas(self._folder, self._vocabulary)
            ends = (*unpack_i32(draw.stop_ids), *single_ids(self._schemas, draw.stop))
            walk = self._schemas.begin(draw.json_schema, ends, draw.around)
            masks = []
            for token in tokens.tolist():
                masks.append(walk.allowed().numpy())
                walk.accept(token)
        except (ValueError, UsageError) as error:
            raise UnusableBatch(
                f"an answer by a JSON schema can't be recomputed: {error}"
            ) from error
        return np.stack(masks)
