"""When a busy server is asked again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.errors import InfrastructureError
from headrace.schemas.recipe.resources.engine_settings import OpenaiOptions
from headrace.services.inference.engines.openai.completion_client import (
    LAST_PAUSE_S,
    PAUSE_S,
    CompletionClient,
    _parsed,
)


def pauses(
    monkeypatch: pytest.MonkeyPatch, after: str = "", tries: int = 8, timeout_s: float = 600.0
) -> list[float]:
    """The seconds between the tries of a prompt at a server that stays busy."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def once(*_: object) -> dict[str, Any]:
        return _parsed("http://s/v1", 503, b"full", after)

    options = OpenaiOptions(url="http://s/v1", served_model="m", tries=tries, timeout_s=timeout_s)
    client = CompletionClient(options)
    monkeypatch.setattr(client, "_once", once)
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        with pytest.raises(InfrastructureError, match="503: full"):
            asyncio.run(client.complete({}))
    return slept


def test_pauses_grow_to_a_bound_and_differ_between_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = pauses(monkeypatch)
    for number, pause_s in enumerate(slept):
        most_s = min(PAUSE_S * 2**number, LAST_PAUSE_S)
        assert most_s / 2 <= pause_s <= most_s
    assert len(slept) == 7
    assert slept != pauses(monkeypatch)


def test_a_server_is_left_alone_for_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(10 <= pause_s <= 15 for pause_s in pauses(monkeypatch, after="10"))
    date = pauses(monkeypatch, after="Fri, 31 Dec 2027 23:59:59 GMT")
    assert 0 < max(date) <= LAST_PAUSE_S


def test_nobody_waits_for_longer_than_the_call_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pauses(monkeypatch, after="3600") == []
    assert pauses(monkeypatch, timeout_s=0.2) == []
