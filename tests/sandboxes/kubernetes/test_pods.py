"""Sandboxes in pods of a real cluster of one node."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import pytest

from headrace.errors import DependencyError, InfrastructureError, UsageError
from headrace.schemas.events import EnvironmentUse
from headrace.services.processes.docker.docker_errors import Conflict
from tests.sandboxes import test_coding, test_repair, test_sandbox, test_task_files
from tests.sandboxes.bench import Bench, claim, on_engine, view
from tests.sandboxes.kubernetes.cluster import NAMESPACE, Cluster

pytestmark = pytest.mark.long

on = partial(on_engine, bound_s=300.0)


def test_commands_run_one_after_the_other_and_files_stay(engine: str) -> None:
    async def test(made: Bench) -> None:
        environment = await made.take()
        first = await environment.reset(view({"prompt": "count"}))
        assert first.text == "count"
        assert str(first.data["image_digest"]).startswith("sha256:")
        said = await environment.step("echo out; echo err >&2; echo 7 > n; pwd")
        assert sorted(said.text.split()) == ["/workspace", "err", "out"]
        assert said.data == {"exit_code": 0, "ended": ""}
        assert (await environment.step("cat n; exit 3")).text == "7\n[exit code 3]"
        assert "not found" in (await environment.step("nosuch")).text
        big = await environment.step("yes 0123456789 | head -c 3000000")
        assert "bytes left out" in big.text
        await environment.aclose()
        assert await made.left() == []

    on(engine, test)


def test_a_sandbox_is_locked_in(engine: str) -> None:
    async def test(made: Bench) -> None:
        environment = await made.fresh()

        async def said(command: str) -> str:
            return (await environment.step(command)).text

        assert int(await said("id -u")) > 1_000_000_000
        status = await said("cat /proc/self/status")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
        assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
        assert "Read-only" in await said("touch /x")
        assert "Read-only" in await said("touch /etc/x")
        assert "No such file" in await said("ls /var/run/secrets/kubernetes.io")
        assert "No space" in await said("dd if=/dev/zero of=f bs=1M count=100; rm -f f")
        assert "No space" in await said("dd if=/dev/zero of=/tmp/f bs=1M count=100; rm -f /tmp/f")
        assert "No space" in await said("dd if=/dev/zero of=/dev/shm/f bs=1M count=9")
        log = "dd if=/dev/zero of=/dev/termination-log bs=1M count=100; wc -c </dev/termination-log"
        assert int((await said(log)).split()[-1]) <= 17 * 2**20
        assert "fork" in await said("b(){ b|b& };b; sleep 1; true")
        assert await said("ulimit -n; ulimit -c") == "1024\n0\n"
        assert await said("echo alive") == "alive\n"

    on(engine, test)


def test_the_first_process_can_be_neither_ended_nor_traced(engine: str) -> None:
    trace = (
        "import ctypes; c = ctypes.CDLL(None, use_errno=True); "
        "print(c.ptrace(16, 1, 0, 0), ctypes.get_errno())"
    )

    async def test(made: Bench) -> None:
        environment = await made.fresh()
        await environment.step("kill -9 1; kill -STOP 1; kill -SEGV 1; kill -9 -1")
        assert (await environment.step(f'python3 -c "{trace}"')).text == "-1 1\n"
        assert "denied" in (await environment.step("ls -l /proc/1/exe; cat /proc/1/mem")).text
        assert (await environment.step("echo alive")).text == "alive\n"

    on(engine, test)


def test_what_ends_as_an_orphan_is_no_process_any_more(engine: str) -> None:
    async def test(made: Bench) -> None:
        environment = await made.fresh()
        for _ in range(3):
            await environment.step("for i in 1 2 3 4 5 6 7 8 9; do (sleep 100 &) ; done")
        # `ps` and the shell of the command, and the first process.
        assert int((await environment.step("ps | wc -l")).text) < 9

    on(engine, test)


def test_limits_end_a_command_and_not_its_sandbox(engine: str) -> None:
    async def test(made: Bench) -> None:
        environment = await made.fresh()
        began = time.monotonic()
        late = await environment.step("sleep 1000 & sleep 1000")
        assert "ended: it ran for 5 s" in late.text
        assert time.monotonic() - began < 60
        assert "it wrote more than 4096 KiB" in (await environment.step("yes")).text
        assert (await environment.step("ps | grep -c '[s]leep 1000'")).text.startswith("0\n")

    on(engine, test, command_s=5)


def test_one_of_many_workers_begins_an_action(engine: str) -> None:
    async def test(made: Bench) -> None:
        mine = claim(task=7)
        first = await made.fresh(mine)
        for done in range(10):
            workers = [await made.take(mine) for _ in range(8)]
            for worker in workers:
                await worker.resume(view(), done=done)
            ended = await asyncio.gather(
                *(worker.sandbox.begin() for worker in workers if worker.sandbox),
                return_exceptions=True,
            )
            assert [error for error in ended if error is None] == [None]
            lost = [error for error in ended if error is not None]
            assert all(isinstance(error, InfrastructureError) for error in lost), lost
        assert first.sandbox is not None
        with pytest.raises(Conflict):
            await made.engine.rename(str(first.sandbox.name), str(first.sandbox.name.next()))

    on(engine, test)


def test_memory_that_is_used_up_is_the_policy_s_loss(engine: str) -> None:
    async def test(made: Bench) -> None:
        environment = await made.fresh()
        said = await environment.step("python3 -c 'bytearray(10**9)'")
        assert said.truncated or said.data["exit_code"] == 137
        assert said.reward is None

    on(engine, test)


KILLER = (
    "import os, signal, time\n"
    "for _ in range(20):\n"
    "    if os.fork() == 0:\n"
    "        os.setsid()\n"
    "        while True:\n"
    "            for p in os.listdir('/proc'):\n"
    "                if p.isdigit() and int(p) > 1 and open(f'/proc/{p}/comm').read() == 'sh\\n':\n"
    "                    os.kill(int(p), 9)\n"
)


def test_who_kills_the_next_command_loses(engine: str) -> None:
    """The killers are killed by the command that they kill, or the sandbox ends for the policy."""

    async def test(made: Bench) -> None:
        environment = await made.fresh()
        await environment.step(f"cat > k.py <<'E'\n{KILLER}E\npython3 k.py & sleep 3")
        said = await environment.step("echo alive")
        assert said.truncated or said.text == "alive\n"
        assert said.reward is None

    on(engine, test, keep_processes=True)


def test_the_deadline_ends_a_pod_where_no_worker_lives(engine: str, made: Cluster) -> None:
    async def test(bench: Bench) -> None:
        environment = await bench.fresh(claim(1, seconds=30))
        name = (await bench.left())[0]
        while (await bench.engine.inspect(name))["State"]["Running"]:
            await asyncio.sleep(0.5)
        assert made.pods()[0]["status"]["reason"] == "DeadlineExceeded"
        with pytest.raises(InfrastructureError, match="sandbox_lost"):
            await environment.step("true")

    on(engine, test)


def test_what_is_wrong_is_said_before_any_episode(engine: str, made: Cluster) -> None:
    async def opened(url: str, **options: Any) -> str:
        wrong = Bench(url, {"pull_s": 20, **options})
        try:
            with pytest.raises((UsageError, DependencyError)) as raised:
                await wrong.setup.open()
        finally:
            await wrong.setup.close_pool()
        return str(raised.value)

    async def main() -> None:
        assert "pull_failed" in await opened(engine, image="localhost/no-such-image:1")
        assert "runtimeclass" in (await opened(engine, runtime="none-such")).lower()
        assert "nodes are available" in await opened(engine, memory_mb=10**9)
        assert "may not create pods" in await opened("kubernetes://worker/default")
        assert "can't be used" in await opened("kubernetes://nowhere/sandboxes")
        path = f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies"
        policy = made.call("GET", path)["items"][0]
        made.call("DELETE", f"{path}/{policy['metadata']['name']}")
        try:
            assert "NetworkPolicy" in await opened(engine)
        finally:
            kept = {"metadata": {"name": policy["metadata"]["name"]}, "spec": policy["spec"]}
            made.call("POST", path, kept)
        assert made.pods() == [] or all(
            pod["metadata"].get("deletionTimestamp") for pod in made.pods()
        )

    asyncio.run(main())


def test_no_pod_is_persistent(engine: str) -> None:
    async def test(made: Bench) -> None:
        with pytest.raises(UsageError, match="Submit it as 'ephemeral'"):
            await made.setup.take(EnvironmentUse(use="default", mode="persistent"), claim())

    on(engine, test)


# What holds for containers holds for pods.
test_another_worker_finds_it = (
    test_sandbox.test_another_worker_finds_it_and_the_first_can_do_nothing_more
)
test_what_was_begun_is_lost = test_sandbox.test_what_was_begun_and_not_answered_is_lost
test_sweeps = test_sandbox.test_only_what_no_open_episode_needs_is_swept_away
test_newer_attempts = test_sandbox.test_a_newer_attempt_is_never_touched
test_removed_from_outside = test_sandbox.test_what_is_removed_from_outside_is_infrastructure
test_solutions_pass = test_coding.test_every_solution_passes_and_a_wrong_one_fails
test_cheats = test_coding.test_no_cheat_is_rewarded
test_repairs = test_repair.test_commands_see_the_files_and_their_end_is_shown
test_collected_again = test_task_files.test_the_next_worker_collects_from_a_sandbox_that_it_finds
