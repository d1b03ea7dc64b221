"""What a publication says of its model."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.trainer.publish import context_length


@pytest.mark.parametrize(
    ("configuration", "context"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"model_type": "gpt2", "n_positions": 1024}, 1024),
        ({"max_position_embeddings": None}, 0),
        ({}, 0),
    ],
)
def test_the_context_length_has_the_name_that_the_model_gives_it(
    configuration: dict[str, Any], context: int
) -> None:
    assert context_length(configuration) == context
