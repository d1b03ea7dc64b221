"""The supervisor with real, tiny child processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import HeadraceError, RecordsLost, UsageError
from headrace.services.base.files import last_lines
from headrace.services.operate.run.supervisor import ChildSpec, RestartRule, Supervisor

BOUND_S = 60
FAST = RestartRule(first_delay_s=0.01, longest_delay_s=0.02, deaths=3)
WAITS = 'read -r line <&{parent_fd}; echo "cluster $line"; read -r line <&{parent_fd}; echo gone'


def shell(name: str, script: str, *, may_end: bool = False) -> ChildSpec:
    return ChildSpec(name, ("/bin/bash", "-c", script), may_end)


async def until(log: Path, text: str) -> None:
    async with asyncio.timeout(BOUND_S):
        while text not in "\n".join(last_lines(log, 100)):
            await asyncio.sleep(0.01)


def test_children_get_the_cluster_and_see_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        supervisor = Supervisor([shell("a", f"trap '' TERM; {WAITS}")], tmp_path)
        await supervisor.start()
        supervisor.send_cluster("here")
        await until(tmp_path / "a.log", "cluster here")
        await supervisor.stop()
        assert last_lines(tmp_path / "a.log", 9) == ["cluster here", "gone"]
        assert supervisor.alive() == 0

    asyncio.run(main())


def test_a_dead_child_is_started_again_and_gets_the_cluster(tmp_path: Path) -> None:
    async def main() -> None:
        notes: list[str] = []
        supervisor = Supervisor(
            [shell("a", f"{WAITS} & wait; exit 5")], tmp_path, rule=FAST, on_change=notes.append
        )
        await supervisor.start()
        supervisor.send_cluster("one")
        await until(tmp_path / "a.log", "cluster one")
        process = supervisor._children[0].process
        assert process is not None
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        await until(tmp_path / "a.log", "cluster one\ncluster one")
        assert supervisor.restarts == 1
        assert notes == ["a was killed by SIGKILL: started again in 0.01 s"]
        await supervisor.stop()

    asyncio.run(main())


def test_a_child_that_dies_again_and_again_fails_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        supervisor = Supervisor([shell("a", "echo boom; exit 7")], tmp_path, rule=FAST)
        await supervisor.start()
        with pytest.raises(HeadraceError, match=r"exit code 7, 3 times(.|\n)*boom") as caught:
            await supervisor.watch()
        assert caught.value.exit_code == 1
        assert supervisor.restarts == 2
        await supervisor.stop()

    asyncio.run(main())


@pytest.mark.parametrize("error", [UsageError, RecordsLost])
def test_what_no_restart_repairs_fails_the_run_at_once(
    tmp_path: Path, error: type[HeadraceError]
) -> None:
    async def main() -> None:
        dying = f"echo what is wrong >&2; exit {error.exit_code}"
        supervisor = Supervisor([shell("a", dying)], tmp_path, rule=FAST)
        await supervisor.start()
        with pytest.raises(error, match="what is wrong"):
            await supervisor.watch()
        assert supervisor.restarts == 0
        await supervisor.stop()

    asyncio.run(main())


def test_a_child_that_may_end_ends(tmp_path: Path) -> None:
    async def main() -> None:
        supervisor = Supervisor([shell("source", "exit 0", may_end=True)], tmp_path, rule=FAST)
        await supervisor.start()
        await asyncio.wait_for(supervisor.watch(), BOUND_S)
        assert supervisor.finished == {"source"}
        await supervisor.stop()

    asyncio.run(main())


def test_a_child_that_does_not_end_is_killed_with_what_it_started(tmp_path: Path) -> None:
    async def main() -> None:
        script = "trap '' TERM; sleep 60 & echo $!; wait; wait"
        supervisor = Supervisor([shell("a", script)], tmp_path)
        await supervisor.start()
        async with asyncio.timeout(BOUND_S):
            while not last_lines(tmp_path / "a.log", 1):
                await asyncio.sleep(0.01)
        grandchild = int(last_lines(tmp_path / "a.log", 1)[0])
        await supervisor.stop(drain_s=0.1)
        async with asyncio.timeout(BOUND_S):
            while _runs(grandchild):
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_only_a_child_that_was_waited_for_did_not_end_in_time(tmp_path: Path) -> None:
    async def main(at_once: bool) -> list[str]:
        notes: list[str] = []
        supervisor = Supervisor(
            [shell("a", "trap '' TERM; echo begun; sleep 60 & wait; wait")],
            tmp_path / str(at_once),
            on_change=notes.append,
        )
        await supervisor.start()
        await until(tmp_path / str(at_once) / "a.log", "begun")
        if at_once:
            supervisor.kill()
        await supervisor.stop(drain_s=0.2)
        return notes

    assert asyncio.run(main(at_once=True)) == []
    assert asyncio.run(main(at_once=False)) == ["a did not end in time and was killed"]


def test_released_children_may_end(tmp_path: Path) -> None:
    async def main() -> None:
        supervisor = Supervisor([shell("a", WAITS)], tmp_path, rule=FAST)
        await supervisor.start()
        supervisor.release()
        supervisor.send_cluster("x")
        await supervisor.stop()
        assert supervisor.restarts == 0

    asyncio.run(main())


def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    parent = f"""
import asyncio
from pathlib import Path
from headrace.services.operate.run.supervisor import ChildSpec, Supervisor
async def main():
    script = {WAITS!r}
    supervisor = Supervisor([ChildSpec("a", ("/bin/bash", "-c", script))], Path({str(tmp_path)!r}))
    await supervisor.start()
    supervisor.send_cluster("here")
    print("ready", flush=True)
    await supervisor.watch()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        asyncio.run(until(tmp_path / "a.log", "cluster here"))
        process.kill()
    asyncio.run(until(tmp_path / "a.log", "gone"))


def test_the_delay_doubles_up_to_its_bound() -> None:
    assert [RestartRule().delay_s(n) for n in range(1, 8)] == [0.5, 1, 2, 4, 8, 8, 8]


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


DRAINS = "trap 'echo drained; exit 0' USR1; echo up; while :; do sleep 0.05; done"


def test_a_child_is_added_and_drained(tmp_path: Path) -> None:
    async def main() -> None:
        notes: list[str] = []
        supervisor = Supervisor([shell("a", DRAINS)], tmp_path, rule=FAST, on_change=notes.append)
        await supervisor.start()
        watching = asyncio.create_task(supervisor.watch())
        await supervisor.add(shell("b", DRAINS))
        await until(tmp_path / "b.log", "up")
        assert supervisor.names(leaving=False) == ["a", "b"]
        supervisor.drain("b")
        supervisor.drain("b")
        assert supervisor.names(leaving=True) == ["b"]
        await until(tmp_path / "b.log", "drained")
        async with asyncio.timeout(BOUND_S):
            while supervisor.names(leaving=True):
                await asyncio.sleep(0.01)
        assert supervisor.alive() == 1
        assert notes == ["b was started", "b drains", "b ended with exit code 0 after its drain"]
        assert not watching.done()
        await supervisor.stop()
        await asyncio.wait_for(watching, BOUND_S)

    asyncio.run(main())


def test_a_child_that_is_killed_while_it_drains_is_not_started_again(tmp_path: Path) -> None:
    async def main() -> None:
        supervisor = Supervisor([shell("a", "trap '' USR1; sleep 99")], tmp_path, rule=FAST)
        await supervisor.start()
        supervisor.drain("a")
        process = supervisor._children[0].process
        assert process is not None
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait_for(supervisor.watch(), BOUND_S)
        assert supervisor.restarts == supervisor.alive() == 0
        await supervisor.stop()

    asyncio.run(main())


def test_an_added_child_that_can_not_be_kept_alive_fails_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        supervisor = Supervisor([shell("a", "sleep 99")], tmp_path, rule=FAST)
        await supervisor.start()
        watching = asyncio.create_task(supervisor.watch())
        await supervisor.add(shell("b", "exit 7"))
        with pytest.raises(HeadraceError, match="b ended with exit code 7, 3 times"):
            await asyncio.wait_for(watching, BOUND_S)
        await supervisor.stop()

    asyncio.run(main())
