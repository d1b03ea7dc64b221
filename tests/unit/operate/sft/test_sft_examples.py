"""Reading many rows can be interrupted, and says how far it is."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from headrace.schemas.recipe.policy import Policy
from headrace.services.models.weights import model_folder
from headrace.services.operate.sft import sft_examples
from headrace.services.operate.sft.sft_examples import Examples, add_rows
from headrace.services.operate.sft.sft_tokens import RowTokens


def test_reading_can_be_cancelled_and_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sft_examples, "SAY_S", 0.0)
    path, said = tmp_path / "rows.jsonl", list[str]()
    path.write_text(json.dumps({"prompt": "2?", "completion": "4"}) + "\n")
    path.write_text(path.read_text() * 20)
    tokens = RowTokens(model_folder("tiny-chat"), Policy(model="tiny-chat"), 0)
    examples = Examples()

    async def read() -> None:
        def say(line: str) -> None:
            said.append(line)
            if len(said) == 3:
                reading.cancel()

        reading = asyncio.create_task(add_rows(examples, [path], tokens, "hermes", say))
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(read())
    assert said == [f"read {number} rows" for number in (1, 2, 3)]
    assert len(examples.sequences) == 3
