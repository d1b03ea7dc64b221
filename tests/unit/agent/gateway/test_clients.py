"""Episodes that are played from outside: taken, ended, given up, and by nobody else."""

from __future__ import annotations

import asyncio
import gc
import sys
import warnings
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from headrace.errors import DependencyError, UsageError
from headrace.infra.local.detached import free_port
from headrace.schemas.events import EpisodeEnded, GenerationRequested, TrajectoryRecorded
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.agent import service as agent_service
from headrace.services.agent.episode import Episode
from headrace.services.agent.gateway import gateway_key
from headrace.services.agent.gateway import server as server_module
from headrace.services.agent.gateway import service as gateway_service
from headrace.services.agent.gateway.chat_session import ChatSession
from headrace.services.agent.gateway.clients import ClientAgent
from headrace.services.agent.gateway.episode_queue import EpisodeQueue, Keys, PendingEpisode
from headrace.services.agent.gateway.refusals import ApiError
from headrace.services.agent.gateway.server import GatewayServer
from headrace.services.operate.run.children import services_of
from headrace.services.worker.service_context import ServiceContext
from tests.unit.agent.gateway.test_program import BOUND_S, Chatting
from tests.unit.agent.test_episode_run import end, task

KEY = "a key that nobody guesses"
HELLO = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}


class Gateway:
    """A gateway, as clients see it."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self.http = http

    async def post(self, path: str, tree: Any, key: str = KEY) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        async with self.http.post(self.url + path, json=tree, headers=headers) as response:
            return response.status, await response.json()

    async def take(self) -> dict[str, Any]:
        """Takes the next episode."""
        status, taken = await self.post("/episodes/take", {})
        assert status == 200
        assert taken["base_url"] == self.url
        return dict(taken)


def play(
    outside: Callable[[Gateway], Awaitable[None]],
    world: Chatting | None = None,
    *,
    idle_s: float = BOUND_S,
    **changes: Any,
) -> EpisodeEnded:
    """An episode that whoever is `outside` plays."""
    client = ClientAgent(idle_s)
    players: list[asyncio.Task[None]] = []

    async def agent(episode: Episode) -> None:
        if client.entrance is None:
            server = GatewayServer(KEY)
            players.append(asyncio.create_task(visit(server)))
            client.entrance = server
        await client(episode)

    async def visit(server: GatewayServer) -> None:
        url = await server.start("127.0.0.1", 0)
        async with aiohttp.ClientSession() as http:
            await outside(Gateway(url, http))
        await server.aclose()

    agent.replayable = False  # type: ignore[attr-defined]

    async def players_end(_: Any) -> None:
        while not players:
            await asyncio.sleep(0)
        await asyncio.wait_for(players[0], BOUND_S)

    submitted = task(environment=None, payload='{"question": "why?"}', **changes)
    world = world or Chatting()
    return end(world, submitted, agent, bound_s=BOUND_S, meanwhile=players_end)


def test_a_client_takes_an_episode_plays_and_ends_it() -> None:
    world = Chatting()

    async def outside(gateway: Gateway) -> None:
        taken = await gateway.take()
        assert (taken["model"], taken["task"]["payload"]) == ("policy", {"question": "why?"})
        status, _ = await gateway.post("/chat/completions", HELLO, taken["api_key"])
        assert status == 200
        assert (await gateway.post("/episode/end", {"reward": 0.25}, taken["report_key"]))[0] == 200

    outcome = play(outside, world)
    assert (outcome.ending, outcome.reward) == ("finished", 0.25)
    assert len(world.trajectory().turns) == 1


def test_keys_open_nothing_but_their_own() -> None:
    async def outside(gateway: Gateway) -> None:
        assert (await gateway.post("/episodes/take", {}, "another key"))[0] == 401
        assert (await gateway.post("/episodes/take", {}, ""))[0] == 401
        assert (await gateway.post("/chat/completions", HELLO))[0] == 401
        taken = await gateway.take()
        for key in (taken["api_key"], taken["report_key"]):
            assert (await gateway.post("/episodes/take", {}, key))[0] == 401
        for path in ("/episode/reward", "/episode/end"):
            assert (await gateway.post(path, {"reward": 1.0}, KEY))[0] == 401
            status, refused = await gateway.post(path, {"reward": 1.0}, taken["api_key"])
            assert (status, "report key" in refused["error"]["message"]) == (403, True)
        assert (await gateway.post("/chat/completions", HELLO, taken["report_key"]))[0] == 401
        await gateway.post("/episode/end", {}, taken["report_key"])

    assert play(outside).ending == "finished"


@pytest.mark.parametrize("silent", [True, False])
def test_a_client_that_is_gone_or_failed_gives_another_the_episode(silent: bool) -> None:
    world = Chatting()

    async def outside(gateway: Gateway) -> None:
        first = await gateway.take()
        await gateway.post("/chat/completions", HELLO, first["api_key"])
        if not silent:
            await gateway.post("/episode/end", {"error": "no power"}, first["report_key"])
        second = await gateway.take()
        assert second["api_key"] != first["api_key"]
        assert (await gateway.post("/chat/completions", HELLO, first["api_key"]))[0] == 401
        await gateway.post("/chat/completions", HELLO, second["api_key"])
        await gateway.post("/episode/end", {"reward": 1.0}, second["report_key"])

    outcome = play(outside, world, idle_s=0.5 if silent else BOUND_S)
    assert (outcome.ending, outcome.attempt, outcome.reward) == ("finished", 1, 1.0)
    assert [one.attempt for one in world.of(GenerationRequested)] == [0, 1]
    (recorded,) = world.of(TrajectoryRecorded)
    said = recorded.failures[0].message
    assert ("no request" if silent else "no power") in said


def test_who_comes_for_nothing_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "TAKE_S", 0.01)

    async def outside(gateway: Gateway) -> None:
        key = (await gateway.take())["report_key"]
        status, refused = await gateway.post("/episodes/take", {})
        assert status == 503
        assert "ask again" in refused["error"]["message"]
        assert refused["error"]["code"] is None
        await gateway.post("/episode/end", {}, key)

    assert play(outside).ending == "finished"


def test_who_waits_for_an_episode_learns_that_the_run_has_ended() -> None:
    async def main() -> None:
        server = GatewayServer(KEY)
        url = await server.start("127.0.0.1", 0)
        async with aiohttp.ClientSession() as http:
            gateway = Gateway(url, http)
            waiting = asyncio.create_task(gateway.post("/episodes/take", {}))
            await asyncio.sleep(0.1)
            server.queue.close(ApiError(410, "the run has ended", "run_ended"))
            for status, refused in (await waiting, await gateway.post("/chat/completions", HELLO)):
                assert (status, refused["error"]["code"]) == (410, "run_ended")
        await server.aclose()

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


def test_who_waited_longest_is_taken_first_and_what_is_given_back_is_next() -> None:
    async def main() -> None:
        queue = EpisodeQueue()
        nobody = cast("ChatSession", None)
        first, second, gone = (
            PendingEpisode(nobody, Keys(name, name), {}) for name in ("first", "second", "gone")
        )
        assert await queue.take(0.01) is None
        with queue.waiting(first), queue.waiting(second):
            with queue.waiting(gone):
                pass
            assert await queue.take(BOUND_S) is first
            assert first.taken.is_set()
            queue.give_back(first)
            assert not first.taken.is_set()
            assert await queue.take(BOUND_S) is first
            assert await queue.take(BOUND_S) is second
            assert await queue.take(0.01) is None
            waiting = asyncio.create_task(queue.take(BOUND_S))
            await asyncio.sleep(0)
            with queue.waiting(gone):
                assert await waiting is gone

    asyncio.run(main())


def test_a_gateway_says_how_many_episodes_wait_and_how_many_are_played() -> None:
    async def main() -> None:
        server = GatewayServer(KEY)
        url = await server.start("127.0.0.1", 0)
        queue, nobody = server.queue, cast("ChatSession", None)
        pending = [PendingEpisode(nobody, Keys(name, name), {}) for name in "ab"]
        async with aiohttp.ClientSession() as http:

            async def counts() -> Any:
                headers = {"Authorization": f"Bearer {KEY}"}
                async with http.get(f"{url}/episodes", headers=headers) as response:
                    assert response.status == 200
                    return await response.json()

            async with http.get(f"{url}/episodes") as refused:
                assert refused.status == 401
            with queue.waiting(pending[0]):
                with queue.waiting(pending[1]):
                    assert await counts() == {"waiting": 2, "playing": 0, "clients": 0}
                    await queue.take(BOUND_S)
                    assert await counts() == {"waiting": 1, "playing": 1, "clients": 1}
                    queue.give_back(pending[0])
                    assert await counts() == {"waiting": 2, "playing": 0, "clients": 0}
                    await queue.take(BOUND_S)
                assert await counts() == {"waiting": 0, "playing": 1, "clients": 1}
            assert await counts() == {"waiting": 0, "playing": 0, "clients": 0}
            asking = asyncio.create_task(queue.take(BOUND_S))
            await asyncio.sleep(0)
            assert await counts() == {"waiting": 0, "playing": 0, "clients": 1}
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert await counts() == {"waiting": 0, "playing": 0, "clients": 0}
        await server.aclose()

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


def test_an_idle_time_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError):
        ClientAgent(idle_s=0)


def recipe(use: str = "client") -> Recipe:
    tree = {
        "name": "test",
        "agents": {"default": {"use": use}},
        "policies": {"default": {"model": "tiny-llama"}},
        "workers": {"agent": 2},
    }
    return Recipe.model_validate(tree)


def test_a_run_with_clients_has_a_gateway_for_its_agent_workers() -> None:
    services = services_of(recipe())
    assert "gateway" in services
    assert "agent" not in services
    assert "gateway" not in services_of(recipe("multi_turn"))


def test_a_gateway_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    context = cast("ServiceContext", SimpleNamespace(recipe=recipe()))
    with pytest.raises(UsageError, match="serve gateway"):
        asyncio.run(agent_service.run(context))
    monkeypatch.setenv(gateway_key.KEY, "short")
    with pytest.raises(UsageError, match="HEADRACE_GATEWAY_KEY"):
        asyncio.run(gateway_service.run(context, "127.0.0.1:0"))
    monkeypatch.setenv(gateway_key.KEY, KEY)
    for listen in ("8100", ":8100", "host:", "host:99999"):
        with pytest.raises(UsageError, match="--listen"):
            asyncio.run(gateway_service.run(context, listen))


def test_a_client_that_comes_after_the_last_episode_learns_that_the_run_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def serve(context: ServiceContext, entrance: GatewayServer) -> None:
        await context.stopping.wait()

    monkeypatch.setattr(agent_service, "run", serve)
    monkeypatch.setattr(gateway_service, "FAREWELL_S", 4.0)
    monkeypatch.setenv(gateway_key.KEY, KEY)

    async def main() -> None:
        events = SimpleNamespace(ending=asyncio.Event(), stopping=asyncio.Event())
        url = f"http://127.0.0.1:{free_port()}/v1"
        listen = url.removeprefix("http://").removesuffix("/v1")
        run = asyncio.create_task(gateway_service.run(cast("ServiceContext", events), listen))
        async with aiohttp.ClientSession() as http:
            gateway = Gateway(url, http)
            status = 0
            while status != 401:  # it listens
                with suppress(aiohttp.ClientConnectorError):
                    status, _ = await gateway.post("/nothing", {})
                await asyncio.sleep(0.01)
            events.ending.set()
            events.stopping.set()
            for _ in range(3):
                assert (await gateway.post("/episodes/take", {}))[0] == 410
                await asyncio.sleep(0.1)
            await run
            with pytest.raises(aiohttp.ClientConnectionError):
                await gateway.post("/episodes/take", {})

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


def test_an_address_that_is_taken_is_said() -> None:
    async def main() -> None:
        server, second = GatewayServer(), GatewayServer()
        url = await server.start("127.0.0.1", 0)
        try:
            with pytest.raises(DependencyError, match="can't listen"):
                await second.start("127.0.0.1", int(url.split(":")[2].removesuffix("/v1")))
        finally:
            await server.aclose()

    asyncio.run(main())


def test_without_aiohttp_a_gateway_says_what_to_install_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(UsageError, match="pip install"):
            asyncio.run(GatewayServer().start("127.0.0.1", 0))
        with pytest.raises(UsageError, match="pip install"):
            asyncio.run(GatewayServer().start_at(tmp_path / "socket"))
        gc.collect()
    assert [one for one in seen if "never awaited" in str(one.message)] == []
