"""Processes that go on when their command ends: killed by default, kept if the recipe says so."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from headrace.errors import InfrastructureError
from headrace.services.env.sandbox.command_start import TRIES
from tests.sandboxes.bench import Bench, bench, claim, view
from tests.sandboxes.survivors import DAEMONS, RACE, STOPPERS, WAITS

LEFT = "ps | grep -c '[s]leep 1$'"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.services.env.sandbox.sandbox.KILL_S", 5.0)


def test_what_a_command_leaves_running_is_killed(engine: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), bench(engine) as made:
            environment = await made.fresh()
            assert (await environment.step(WAITS)).text == "over\n"
            await all_end(made)
            killed = await environment.step("kill -9 $PPID; kill -9 $$")
            assert (killed.data["exit_code"], killed.done) == (137, False)
            useless = await environment.step(f"{WAITS}; kill -9 $PPID; sleep 5")
            assert useless.truncated
            assert "processes that are left" in useless.text

    asyncio.run(main())


@pytest.mark.parametrize("how", STOPPERS)
def test_who_stops_the_next_command_ends_the_sandbox(engine: str, how: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(120):
            made = Bench(engine, {"command_s": 3})
            async with made._instances.reporting():
                await made.setup.open()
                environment = await made.take(claim(seconds=25))
                await environment.reset(view())
                ended = await environment.step(STOPPERS[how])
                if how == RACE and not ended.truncated:
                    # The kill was over before the policy saw it: the sandbox can be used as before.
                    assert ended.text == "[ended: it ran for 3 s]"
                    assert (await environment.step("echo on")).text == "on\n"
                    return await made.setup.close_pool()
                assert ended.truncated
                assert ended.reward is None
                while await made.left():  # at the latest when its deadline ends its processes
                    with suppress(InfrastructureError):
                        await made.engine.remove((await made.left())[0].lstrip("/"))
                await made.setup.close_pool()

    asyncio.run(main())


async def all_end(made: Bench) -> None:
    """A killed process is there until its parent notices."""
    async with asyncio.timeout(60):
        while await users_processes(made):
            await asyncio.sleep(0.05)


async def users_processes(made: Bench) -> int:
    """How many there are between two commands, without a command that would kill them."""
    (name,) = await made.left()
    return (await made.engine.usage(name.lstrip("/")))[0] - 2  # the keeper and its parent


def test_a_recipe_may_keep_processes_and_the_policy_answers_for_them(engine: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), bench(engine, keep_processes=True) as made:
            environment = await made.fresh()
            await environment.step(WAITS)
            assert await users_processes(made) > 0
            assert (await environment.step(f"echo begins; {LEFT}")).text == "begins\n1\n"
            ended = await environment.step(DAEMONS["it kills all others"])
            for _ in range(TRIES):
                if ended.truncated:
                    break
                ended = await environment.step("sleep 1")
            assert ended.truncated
            assert ended.reward is None
            assert "processes that are left" in ended.text

    asyncio.run(main())
