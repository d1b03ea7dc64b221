"""Schemas that take too long, and what goes on beside them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from headrace.errors import InfrastructureError
from headrace.services.inference.engine import EnginePrompt
from headrace.services.inference.engines import grammar_states
from headrace.services.inference.engines.grammar_states import GrammarCompiler
from headrace.services.models.json_schema import GrammarState, Schemas
from headrace.services.models.weights import model_folder

VOCABULARY = 258
END = 257


def asked(name: str) -> EnginePrompt:
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    return EnginePrompt("default", [1], 10, stop_ids=(END,), json_schema=json.dumps(schema))


class Held(Schemas):
    """Takes as long as it is held over what is called slow."""

    go = threading.Event()
    slow = 0
    at_once = 0
    most_at_once = 0

    def begin(self, schema: str, *form: Any) -> GrammarState:
        Held.at_once += 1
        Held.most_at_once = max(Held.most_at_once, Held.at_once)
        if "slow" in schema:
            Held.slow += 1
            assert Held.go.wait(60)
        Held.at_once -= 1
        return super().begin(schema, *form)


@pytest.fixture
def grammars(monkeypatch: pytest.MonkeyPatch) -> GrammarCompiler:
    Held.go.clear()
    Held.slow = Held.at_once = Held.most_at_once = 0
    monkeypatch.setattr(grammar_states, "Schemas", Held)
    monkeypatch.setattr(grammar_states, "COMPILE_S", 2.0)  # a busy machine compiles in less
    return GrammarCompiler(model_folder("tiny-llama"), VOCABULARY)


def drive(main: Coroutine[Any, Any, None]) -> None:
    try:
        asyncio.run(asyncio.wait_for(main, 60))
    finally:
        Held.go.set()


def test_what_takes_too_long_is_refused_and_known_from_then_on(grammars: GrammarCompiler) -> None:
    async def main() -> None:
        asks = [asyncio.create_task(grammars.begin(asked(n))) for n in ("slow", "quick", "slow")]
        slow, quick, again = await asyncio.gather(*asks, return_exceptions=True)
        for refused in (slow, again):
            assert isinstance(refused, ValueError)
            assert "takes more than 2 s to compile" in str(refused)
        assert isinstance(quick, GrammarState)
        assert Held.slow == 1

    drive(main())


def test_abandoned_compilations_are_limited_and_make_room_at_their_end(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_states, "ABANDONED", 1)

    async def main() -> None:
        with pytest.raises(ValueError, match="to compile"):
            await grammars.begin(asked("slow"))
        with pytest.raises(InfrastructureError, match="schemas_busy"):
            await grammars.begin(asked("quick"))
        Held.go.set()
        while True:
            try:
                assert (await grammars.begin(asked("quick"))).allowed().any()
                return
            except InfrastructureError:
                await asyncio.sleep(0.01)

    drive(main())


def test_after_a_cancelled_caller_no_two_compile_at_once(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_states, "COMPILE_S", 60)

    async def main() -> None:
        left = asyncio.create_task(grammars.begin(asked("slow")))
        while not Held.slow:
            await asyncio.sleep(0.01)
        left.cancel()
        other = asyncio.create_task(grammars.begin(asked("quick")))
        await asyncio.sleep(0.05)
        assert not other.done()
        Held.go.set()
        assert (await other).allowed().any()
        assert Held.most_at_once == 1

    drive(main())
