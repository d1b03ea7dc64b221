"""A run says how clients reach its gateway, and how many it has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from headrace.errors import UsageError
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.agent.gateway.chat_session import ChatSession
from headrace.services.agent.gateway.episode_queue import Keys, PendingEpisode
from headrace.services.agent.gateway.gateway_key import KEY
from headrace.services.agent.gateway.server import GatewayServer
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.operate import gateway_watch
from headrace.services.operate.gateway_watch import GatewayWatch, ask, watch_of_gateway
from headrace.services.operate.run.run import LocalRun
from headrace.services.operate.serve.services import LISTEN_VARIABLE

SECRET = "a key that nobody guesses"


def test_it_invites_clients_once_and_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, SECRET)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(gateway_watch, "INTERVAL_S", 0.02)
    notes: list[str] = []

    async def main() -> None:
        server = GatewayServer(SECRET)
        watch = GatewayWatch(await server.start("127.0.0.1", 0))
        following = asyncio.create_task(watch.follow(notes.append))
        episode = PendingEpisode(cast("ChatSession", None), Keys("a", "b"), {})
        with server.queue.waiting(episode):
            while (watch.waiting, watch.playing) != (1, 0):
                await asyncio.sleep(0.01)
            await server.queue.take(1)
            while (watch.waiting, watch.playing) != (0, 1):
                await asyncio.sleep(0.01)
        await server.aclose()
        await asyncio.sleep(0.1)
        assert not following.done()
        following.cancel()
        (note,) = notes
        assert watch.url in note
        for name in (KEY, "OPENAI_BASE_URL", "OPENAI_API_KEY"):
            assert name in note
        assert SECRET not in note
        with pytest.raises(OSError, match="refused"):
            ask(watch.url)

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        (None, "http://127.0.0.1:8100/v1"),
        ("0.0.0.0:81", "http://127.0.0.1:81/v1"),
        ("[::]:81", "http://[::1]:81/v1"),
        ("gateway:81", "http://gateway:81/v1"),
        ("127.0.0.1:0", None),
        ("127.0.0.1:x", None),
    ],
)
def test_it_asks_where_the_gateway_listens(
    listen: str | None, url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, SECRET)
    monkeypatch.delenv(LISTEN_VARIABLE, raising=False)
    if listen is not None:
        monkeypatch.setenv(LISTEN_VARIABLE, listen)
    watch = watch_of_gateway()
    assert (watch and watch.url) == url


def test_a_run_whose_clients_have_no_key_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY, raising=False)
    tree = {
        "name": "r",
        "agents": {"default": {"use": "client"}},
        "policies": {"default": {"model": "tiny-llama"}},
    }
    with pytest.raises(UsageError, match=f"export {KEY}="):
        LocalRun(Recipe.model_validate(tree), ClusterConfig(state=tmp_path), quiet=True)
