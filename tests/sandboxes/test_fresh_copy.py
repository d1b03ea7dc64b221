"""Grading in a fresh sandbox: what it contains, what it never contains, and that none is left."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from headrace.errors import InfrastructureError
from headrace.services.env.sandbox.command_start import SandboxEnded
from headrace.services.env.sandbox.sandbox import Sandbox
from tests.sandboxes.bench import Bench, claim, on_engine, view
from tests.sandboxes.survivors import DAEMONS, SHADOWS, WAITS, daemon

BOUND_S = 120.0
on = partial(on_engine, bound_s=BOUND_S)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.services.env.sandbox.sandbox.KILL_S", 5.0)


REPOSITORY: dict[str, Any] = {
    "prompt": "repair it",
    "files": {"a.py": "def f(n):\n    return n\n"},
    "tests": [["a:f", [1], 2]],
}
REPAIR = "printf 'def f(n):\\n    return n + 1\\n' > a.py"


async def sandbox_of(made: Bench) -> Sandbox:
    sandbox = (await made.fresh()).sandbox
    assert sandbox is not None
    return sandbox


async def sh(sandbox: Sandbox, command: str) -> str:
    return (await sandbox.run(("sh", "-c", command))).output


def test_a_copy_has_the_files_and_nothing_else(engine: str) -> None:
    async def test(made: Bench) -> None:
        sandbox = await sandbox_of(made)
        await sh(
            sandbox,
            "mkdir -p d/e closed; echo text > d/e/f; ln d/e/f hard; ln -s /etc/passwd soft; "
            "touch closed/x; chmod 500 closed; touch secret; chmod 0 secret; mkfifo p; "
            "touch \"$(printf 'a\\nb\\377')\"; chmod 755 d/e/f; echo x | tee /tmp/x > /dev/shm/x; "
            f"{WAITS}",
        )
        async with sandbox.fresh_copy() as fresh:
            assert len(await made.left()) == 2
            found = await sh(fresh, "find . | tr '\\n' ' '; ls /tmp /dev/shm; cat d/e/f")
            copied = ". ./d ./d/e ./d/e/f ./hard ./soft ./closed ./closed/x ./a b\ufffd"
            assert sorted(found.split()) == sorted(f"{copied} /tmp: /dev/shm: text".split(" "))
            assert await sh(fresh, "ps | grep -c '[s]leep 1$'") == "0\n"
            assert await sh(fresh, "[ d/e/f -ef hard ] && [ -x hard ] && echo same") == "same\n"
            await sh(fresh, "echo changed > d/e/f")
        assert await sh(sandbox, "cat d/e/f") == "text\n"
        assert len(await made.left()) == 1
        async with sandbox.fresh_copy(files=False) as fresh:
            assert await sh(fresh, "ls -A /workspace /tmp") == "/tmp:\n\n/workspace:\n"

    on(engine, test)


@pytest.mark.parametrize("command", ["dd if=/dev/zero of=f bs=1 count=1 seek=4000000000", "exit"])
def test_a_sparse_file_is_the_policy_s_failure(engine: str, command: str) -> None:
    async def test(made: Bench) -> None:
        sandbox = await sandbox_of(made)
        await sh(sandbox, command)
        if command == "exit":
            async with sandbox.fresh_copy():
                return
        with pytest.raises(SandboxEnded, match="could not be copied"):
            async with sandbox.fresh_copy():
                raise AssertionError

    on(engine, test)


def test_a_full_workspace_is_copied(engine: str) -> None:
    async def test(made: Bench) -> None:
        sandbox = await sandbox_of(made)
        await sh(sandbox, "mkdir n; cd n; i=0; while [ $i -lt 500 ]; do : > $i; i=$((i+1)); done")
        await sh(sandbox, "dd if=/dev/urandom of=f bs=1M count=100; true")
        size = "wc -c < f; ls n | wc -l"
        expected = await sh(sandbox, size)
        async with sandbox.fresh_copy() as fresh:
            assert await sh(fresh, size) == expected

    on(engine, test)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_nothing_that_is_left_behind_changes_a_grade(engine: str, every: int) -> None:
    chosen = list({**DAEMONS, **SHADOWS}.items())[::every]
    harms, shadows = dict(chosen), [*SHADOWS.values()][::every]
    room = asyncio.Semaphore(4)

    async def attempt(made: Bench, number: int, *commands: str) -> float | None:
        environment = await made.take(claim(number))
        try:
            await environment.reset(view(REPOSITORY))
            for command in (*commands, "submit"):
                said = await environment.step(command)
                if said.done:  # the sandbox is useless: no attempt follows
                    break
            return said.reward
        finally:
            await environment.aclose()

    async def play(made: Bench, number: int, *commands: str) -> float | None:
        async with room:
            for again in range(3):  # A busy host may be too slow, and a run tries again, too.
                with suppress(InfrastructureError):
                    return await attempt(made, number + 100 * again, *commands)
        raise AssertionError("three attempts failed by the infrastructure")

    async def test(made: Bench) -> None:
        harmed = (play(made, number, harms[name]) for number, name in enumerate(harms))
        for name, reward in zip(harms, await asyncio.gather(*harmed), strict=True):
            assert reward == 0.0, name
        repaired = (play(made, 50 + n, harm, REPAIR) for n, harm in enumerate(shadows))
        assert await asyncio.gather(*repaired) == [1.0] * len(shadows)

    on(engine, test, tool="repair", command_s=4)


def _hang_in_a_copy(engine: str, grading: Any) -> None:
    async def test(made: Bench) -> None:
        sandbox = await sandbox_of(made)
        async with sandbox.fresh_copy() as fresh:
            grading.set()
            await sh(fresh, daemon("time.sleep(1)"))
            await asyncio.sleep(BOUND_S)

    on(engine, test)


def test_no_copy_is_left_if_its_worker_is_killed(engine: str) -> None:
    context = multiprocessing.get_context("fork")
    grading = context.Event()
    worker = context.Process(target=_hang_in_a_copy, args=(engine, grading))
    worker.start()
    assert grading.wait(BOUND_S)
    assert worker.pid is not None
    os.kill(worker.pid, 9)
    worker.join(BOUND_S)

    async def test(made: Bench) -> None:
        assert len(await made.left()) == 2
        environment = await made.take()
        await environment.resume(view(), done=0)
        assert environment.sandbox is not None
        assert not environment.sandbox.name.copy
        lost = await made.take()
        with pytest.raises(InfrastructureError, match="sandbox_lost"):
            await lost.resume(view(), done=1)
        await lost.aclose()
        assert await made.left() == []

    on(engine, test)
