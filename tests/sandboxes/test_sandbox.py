"""Sandboxes on a real engine: commands, limits, finding again, sweeping, pools, failures."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import DependencyError, InfrastructureError, UsageError
from headrace.schemas.events import EnvironmentUse
from headrace.services.env.sandbox.sandbox import Sandbox
from headrace.services.processes.docker.docker_engine import DockerEngine
from headrace.services.processes.docker.docker_errors import NotThere
from tests.sandboxes.bench import Bench, claim, on_engine, view
from tests.sandboxes.docker_engine import IMAGE

on = partial(on_engine, bound_s=120.0)


def test_commands_run_one_after_the_other_and_files_stay(engine: str) -> None:
    async def test(made: Bench) -> None:
        environment = await made.take()
        first = await environment.reset(view({"prompt": "count"}))
        assert first.text == "count"
        said = await environment.step("echo out; echo err >&2; echo 7 > n; id -u; pwd")
        assert said.text.split() == ["out", "err", "65534", "/workspace"]
        assert said.data == {"exit_code": 0, "ended": ""}
        assert said.reward is None
        assert (await environment.step("cat n; exit 3")).text == "7\n[exit code 3]"
        assert "not found" in (await environment.step("nosuch")).text
        assert "NUL" in (await environment.step("echo \0")).text
        assert "longer than" in (await environment.step("echo " + "x" * 100_001)).text
        await environment.aclose()
        assert await made.left() == []

    on(engine, test)


def test_a_python_program_is_an_action(engine: str) -> None:
    async def test(made: Bench) -> None:
        environment = await made.fresh()
        assert (await environment.step("print(sum(range(5)))")).text == "10\n"
        assert "ZeroDivisionError" in (await environment.step("1 / 0")).text

    on(engine, test, tool="python")


def test_limits_end_a_command_and_not_its_sandbox(engine: str) -> None:
    async def test(made: Bench) -> None:
        environment = await made.fresh()
        began = time.monotonic()
        late = await environment.step("sleep 1000 & sleep 1000")
        assert "ended: it ran for 2 s" in late.text
        assert time.monotonic() - began < 60
        flood = await environment.step("yes")
        assert "it wrote more than 4096 KiB" in flood.text
        assert "bytes left out" in flood.text
        assert len(flood.text) < 17 * 1024
        big = await environment.step("python3 -c 'bytearray(10**9)'")
        assert big.data["exit_code"] == 137
        assert "fork" in (await environment.step("b(){ b|b& };b; sleep 1; true")).text
        full = await environment.step(
            "dd if=/dev/zero of=/workspace/f bs=1M count=100; rm -f /workspace/f"
        )
        assert "No space left" in full.text
        assert (await environment.step("echo alive")).text == "alive\n"
        assert (await environment.step("ps | grep -c '[s]leep 1000'")).text.startswith("0\n")

    on(engine, test, command_s=2)


def test_who_kills_a_sandbox_is_responsible_and_not_memory_that_was_used_up_before(
    engine: str,
) -> None:
    async def test(made: Bench) -> None:
        environment = await made.fresh()
        assert (await environment.step("python3 -c 'bytearray(10**9)'")).data["exit_code"] == 137
        assert environment.sandbox is not None
        assert isinstance(made.engine, DockerEngine)
        name = str(environment.sandbox.name)
        await asyncio.sleep(1)  # the engine hears of it by an event
        await made.engine._call("kill", lambda client: client.kill(name))
        with pytest.raises(InfrastructureError, match="sandbox_lost"):
            await environment.step("true")

    on(engine, test)


def test_another_worker_finds_it_and_the_first_can_do_nothing_more(engine: str) -> None:
    async def test(made: Bench) -> None:
        mine = claim(task=3)
        first = await made.fresh(mine)
        await first.step("echo 1 > n")
        await first.release()
        second = await made.take(mine)
        await second.resume(view(), done=1)
        assert (await second.step("cat n")).text == "1\n"
        with pytest.raises(InfrastructureError, match="sandbox_lost"):
            await first.step("echo 2 > n")
        assert (await second.step("cat n")).text == "1\n"

    on(engine, test)


def test_a_worker_that_was_frozen_before_a_reset_leaves_the_next_ones_sandbox(engine: str) -> None:
    async def test(made: Bench) -> None:
        frozen = await made.take(replace(claim(), repeated=False))
        following = await made.fresh()
        with pytest.raises(InfrastructureError, match="sandbox_lost: another worker"):
            await frozen.reset(view())
        assert (await following.step("echo lives")).text == "lives\n"

    on(engine, test)


def test_what_was_begun_and_not_answered_is_lost(engine: str) -> None:
    async def test(made: Bench) -> None:
        mine = claim(task=4)
        first = await made.fresh(mine)
        await first.step("true")
        second = await made.take(mine)
        with pytest.raises(InfrastructureError, match="action 1 begun, 0 answered"):
            await second.resume(view(), done=0)
        assert len(await made.left()) == 1  # Perhaps the action was answered after all.
        await second.aclose()
        assert await made.left() == []
        with pytest.raises(InfrastructureError, match="sandbox_lost: its container is gone"):
            await second.resume(view(), done=0)

    on(engine, test)


def test_neither_of_two_sandboxes_of_one_attempt_is_resumed(engine: str) -> None:
    """A worker that has lost the partition may have made the other one late: it has no files."""

    async def test(made: Bench) -> None:
        first = await made.fresh()
        await first.host.create(claim(), IMAGE, persistent=False, copy=False)
        second = await made.take()
        with pytest.raises(InfrastructureError, match="sandbox_lost: it has two containers"):
            await second.resume(view(), done=0)

    on(engine, test)


def test_a_command_that_the_engine_has_forgotten_is_no_fault_of_the_policy(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart of an engine that lets its containers live."""

    async def test(made: Bench) -> None:
        async def exit_code(run: str) -> int | None:
            raise NotThere("exec_failed", "no such exec")

        async def read(*_: object) -> str:
            return ""

        environment = await made.fresh()
        monkeypatch.setattr(made.engine, "exit_code", exit_code)
        monkeypatch.setattr(Sandbox, "_read", read)
        with pytest.raises(InfrastructureError, match="exec_failed: no such exec"):
            await environment.step("sleep 100")

    on(engine, test)


def test_only_what_no_open_episode_needs_is_swept_away(engine: str) -> None:
    async def test(made: Bench) -> None:
        for task, attempt, offset in ((1, 0, 5), (2, 1, 6), (3, 0, 9)):
            await made.fresh(claim(task, attempt=attempt, offset=offset))
        open_attempts = {(1, 0): 0, (2, 0): 2}

        async def sweep(read_to: int) -> list[str]:
            await made.setup.sweep(
                0, read_to, lambda task, sample: open_attempts.get((task, sample))
            )
            return sorted(name.split(".")[2] for name in await made.left())

        await made.setup.sweep(1, 100, lambda task, sample: None)  # another partition
        assert await sweep(5) == ["1-0-0", "2-0-1", "3-0-0"]
        assert await sweep(8) == ["1-0-0", "3-0-0"]  # attempt 2 of it is open
        assert await sweep(9) == ["1-0-0"]  # read, and not open
        open_attempts[1, 0] = 0
        assert await sweep(100) == ["1-0-0"]
        del open_attempts[1, 0]
        assert await sweep(100) == []

    on(engine, test)


def test_a_newer_attempt_is_never_touched(engine: str) -> None:
    async def test(made: Bench) -> None:
        newer = await made.fresh(claim(1, attempt=2))
        older = await made.fresh(claim(1, attempt=1))
        await made.setup.clear(claim(1, attempt=1))
        assert [name.split(".")[2] for name in await made.left()] == ["1-0-2"]
        await older.aclose()
        await made.setup.sweep(0, 100, lambda task, sample: 1)
        assert (await newer.step("echo here")).text == "here\n"

    on(engine, test)


def test_it_ends_by_its_deadline_where_no_worker_lives(engine: str) -> None:
    async def test(made: Bench) -> None:
        for seconds in (2, 8, 32):  # a busy machine may need long to begin
            with suppress(InfrastructureError):
                environment = await made.fresh(claim(1, seconds=seconds))
                break
        name = (await made.left())[0].lstrip("/")
        while (await made.engine.inspect(name))["State"]["Running"]:
            await asyncio.sleep(0.2)
        with pytest.raises(InfrastructureError, match="sandbox_lost"):
            await environment.step("true")

    on(engine, test)


def test_a_persistent_sandbox_is_reset_and_used_again(engine: str) -> None:
    async def test(made: Bench) -> None:
        use = EnvironmentUse(use="default", mode="persistent")
        first = await made.take(claim(1), "persistent")
        await first.reset(view())
        await first.step("echo secret > /workspace/n; echo x > /tmp/x; sleep 500 & echo")
        await made.setup.give_back(use, first, fit=True)
        assert [".idle." in name for name in await made.left()] == [True]
        second = await made.take(claim(2), "persistent")
        await second.reset(view())
        left = await second.step("ls -A /workspace /tmp; ps | grep -c '[s]leep 500'")
        assert left.text.split() == ["/tmp:", "/workspace:", "0", "[exit", "code", "1]"]
        assert second.sandbox is not None
        assert first.sandbox is not None
        assert second.sandbox.name.instance == first.sandbox.name.instance
        with pytest.raises(InfrastructureError, match="sandbox_lost"):
            await first.step("echo late")
        await made.setup.give_back(use, second, fit=False)
        assert await made.left() == []
        states = ["provisioning", "ready", "busy", "ready", "busy", "gone"]
        assert [state for _, state in made.states] == states

    on(engine, test)


def test_an_idle_sandbox_is_taken_by_one_of_those_that_would_have_it(engine: str) -> None:
    async def test(made: Bench) -> None:
        use = EnvironmentUse(use="default", mode="persistent")
        for number in range(0, 12, 4):
            takers = [await made.take(claim(number + one), "persistent") for one in range(4)]
            await asyncio.gather(*(one.reset(view()) for one in takers))
            said = await asyncio.gather(*(one.step(f"echo {i}") for i, one in enumerate(takers)))
            assert [one.text for one in said] == [f"{i}\n" for i in range(4)]
            assert len({str(one.sandbox and one.sandbox.name.token) for one in takers}) == 4
            for index, taker in enumerate(takers):  # one stays for all of the next round
                await made.setup.give_back(use, taker, fit=index == 0)
            assert len(await made.left()) == 1

    on(engine, test)


def test_what_is_removed_from_outside_is_infrastructure(engine: str) -> None:
    """Before its command begins, while that begins, and while it runs."""

    async def test(made: Bench) -> None:
        for after_s in (0, 0.05, 0.1, 0.2, 1):
            environment = await made.fresh()
            assert environment.sandbox is not None
            running = asyncio.create_task(environment.step("sleep 100"))
            while environment.sandbox.name.begun == 0:
                await asyncio.sleep(0.01)
            await asyncio.sleep(after_s)
            await made.engine.remove(str(environment.sandbox.name))
            with pytest.raises(InfrastructureError, match="sandbox_lost"):
                await running

    on(engine, test, command_s=60)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"image": "no-such-image"}, "has no image 'no-such-image' and can't pull it"),
        ({"runtime": "runsc"}, "no runtime 'runsc'"),
    ],
)
def test_what_the_engine_lacks_is_said_before_any_episode(
    engine: str, options: dict[str, Any], complaint: str
) -> None:
    async def main() -> None:
        made = Bench(engine, options)
        try:
            with pytest.raises(UsageError, match=complaint):
                await made.setup.open()
        finally:
            await made.setup.close_pool()

    asyncio.run(main())


def test_a_task_names_no_image_but_the_recipes(engine: str) -> None:
    async def test(made: Bench) -> None:
        with pytest.raises(UsageError, match="not among its `images`"):
            await made.setup.take(EnvironmentUse(use="default", image="mine"), claim())
        await made.setup.take(EnvironmentUse(use="default", image=IMAGE), claim())

    on(engine, test)


def test_no_engine_is_no_reward(tmp_path: Path) -> None:
    async def main() -> None:
        made = Bench(f"unix://{tmp_path}/none.sock", {})
        with pytest.raises(
            DependencyError, match=r"can't be used .*none\.sock.*No such file.*Start it"
        ):
            await made.setup.open()
        environment = await made.take()
        with pytest.raises(InfrastructureError, match="engine_unreachable"):
            await environment.reset(view())
        await made.setup.close_pool()

    asyncio.run(main())


def test_a_wrong_option_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="privileged: no such key"):
        Bench(f"unix://{tmp_path}/s", {"privileged": True})
