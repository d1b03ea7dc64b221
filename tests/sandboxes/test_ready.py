"""Containers that are started before episodes need them, and persistent ones."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest

from headrace.services.env.sandbox.container_names import Which
from headrace.services.env.sandbox.docker_environment import DockerEnvironment
from tests.sandboxes.bench import NAMESPACE, Bench, bench, claim, view

BOUND_S = 120.0


async def ready(made: Bench) -> set[str]:
    return {name.lstrip("/") for name in await made.left() if ".ready." in name}


async def deadlines(made: Bench) -> dict[str, float]:
    """When each container ends by itself, by its instance."""
    found = await made.source.find({"headrace.namespace": NAMESPACE}, Which(""))
    labels = [container["Labels"] for container in found]
    return {each["headrace.instance"]: float(each["headrace.deadline"]) for each in labels}


async def until_ready(made: Bench, count: int) -> set[str]:
    while len(found := await ready(made)) != count:
        await asyncio.sleep(0.1)
    return found


def test_episodes_and_copies_take_ready_sandboxes_which_are_replaced(engine: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(BOUND_S), bench(engine, ready=3) as made:
            first = await until_ready(made, 3)
            with patch.object(made.source, "create", wraps=made.source.create) as create:
                environment = await made.fresh()
                assert environment.sandbox is not None
                assert (await environment.step("echo x > a; cat a; ls /tmp")).text == "x\n"
                async with environment.sandbox.fresh_copy() as fresh:
                    assert (await fresh.run(("cat", "a"))).output == "x\n"
                    used = {environment.sandbox.name.instance, fresh.name.instance}
                    ends = await deadlines(made)
                again = await until_ready(made, 3)
            created = {call.args[0] for call in create.call_args_list}
            assert all(".ready." in name for name in created), "a sandbox was made for an episode"
            assert again <= created | first
            taken = [ends.pop(instance) for instance in used]
            assert max(taken) <= min(ends.values()), "one that ends later was taken first"
            await environment.aclose()

    asyncio.run(main())


def test_two_workers_never_take_the_same_and_the_last_one_leaves_nothing(engine: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(BOUND_S), bench(engine, ready=4) as one:
            other = Bench(engine, {"ready": 4})
            await other.setup.open()
            (host,) = one.setup.hosts.all
            await asyncio.gather(*(host.create_ready() for _ in range(3)))  # too many
            await until_ready(one, 4)
            begun = await asyncio.gather(
                *(made.fresh(claim(task)) for task, made in enumerate((one, other) * 4))
            )
            tokens = [each.sandbox.name.token for each in begun if each.sandbox is not None]
            assert len(set(tokens)) == 8
            said = await asyncio.gather(*(each.step("echo here") for each in begun))
            assert {each.text for each in said} == {"here\n"}
            for each in begun:
                await each.aclose()
            await other.setup.close_pool()
            await host.close_pool()
            assert await one.left() == []

    asyncio.run(main())


def test_a_persistent_sandbox_is_restarted_when_its_episode_ends(engine: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(BOUND_S), bench(engine, keep_processes=True) as made:
            environment = await made.take(claim(1), "persistent")
            await environment.reset(view())
            await environment.step("touch left; sleep 600 &")
            assert environment.sandbox is not None
            name = environment.sandbox.name
            await environment.host.pool(name)
            (idle,) = await made.left()
            processes, _ = await made.engine.usage(idle.lstrip("/"))
            assert processes <= 2  # its first process, and what reaps
            later = await made.take(claim(2), "persistent")
            await later.reset(view())
            assert later.sandbox is not None
            assert later.sandbox.name.token == name.token
            assert (await later.step("ls -A")).text == ""
            await later.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("later_s", [0.0, 0.02, 0.1])
def test_an_ending_worker_takes_no_container_from_an_episode(engine: str, later_s: float) -> None:
    """Those that a worker made ready are taken by another one while it removes them."""

    async def main() -> None:
        async with asyncio.timeout(BOUND_S), bench(engine, ready=6) as made:
            ending = Bench(engine, {"ready": 6})
            await ending.setup.open()
            await until_ready(made, 6)
            environments = [await made.take(claim(task)) for task in range(6)]

            async def play(each: DockerEnvironment) -> str:
                await each.reset(view())
                return (await each.step("echo here")).text

            closing = asyncio.create_task(ending.setup.close_pool())
            await asyncio.sleep(later_s)
            played = await asyncio.gather(*map(play, environments), return_exceptions=True)
            await closing
            # Docker may carry out a rename late, as container_names.py says.
            assert played.count("here\n") >= 5, played
            for each in environments:
                await each.aclose()

    asyncio.run(main())
