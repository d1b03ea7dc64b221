"""The local stack with the real servers, through every way in which they end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from headrace.errors import DependencyError, UsageError
from headrace.infra.local import LocalStack, detached, down, find, jars, up
from headrace.infra.local import stack_record as record
from headrace.infra.local.detached import ProcessId, free_port, wait_for_exit

OWNER = """
import os, signal, sys, time
from pathlib import Path
from headrace.infra.local import up

# A test run in the background ignores SIGINT, and what it starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
up(
    Path(sys.argv[1]),
    on_progress=lambda line: print(line, flush=True),
    kafka_port=0,
    registry_port=0,
    owner_pid=os.getpid(),
)
print("up", flush=True)
time.sleep(120)
"""


HOLDER = """
import sys
from pathlib import Path
from headrace.infra.local import hold

hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


CTRL_C_AS_IT_IS_UP = """
import signal, sys
from pathlib import Path
from headrace.infra.local import stack

signal.signal(signal.SIGINT, signal.default_int_handler)
describe = stack._describe

def ctrl_c_then_describe(*arguments):
    print("up", flush=True)
    signal.raise_signal(signal.SIGINT)
    return describe(*arguments)

stack._describe = ctrl_c_then_describe
stack.up(Path(sys.argv[1]), kafka_port=0, registry_port=0)
"""


CTRL_C_BEFORE_THE_STACK = """
import os, signal, sys
from headrace.services.operate import cli
from headrace.services.operate.run.run_stack import RunStack

up = RunStack.up

def ctrl_c_then_up(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    return up(*arguments)

RunStack.up = ctrl_c_then_up
sys.argv = ["headrace", "run", "null", "--state", sys.argv[1]]
cli.main()
"""


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    # A path that would break any unquoted use of it.
    state = tmp_path / "a state, with $(odd) = characters"
    yield state
    down(state, wipe=True)


def up_on_free_ports(state: Path) -> LocalStack:
    return up(state, kafka_port=0, registry_port=0)


def kill_9(pid: int) -> None:
    process = ProcessId.of(pid)
    assert process is not None
    os.kill(pid, signal.SIGKILL)
    assert wait_for_exit(process, 10)


def make_topic(stack: LocalStack, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers})
    admin.create_topics([NewTopic(name, 2, 1)])[name].result(10)


def topics(stack: LocalStack) -> set[str]:
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers})
    return set(admin.list_topics(timeout=10).topics)


def register(stack: LocalStack, subject: str, schema: str) -> int:
    request = urllib.request.Request(
        f"{stack.registry_url}/subjects/{subject}/versions",
        json.dumps({"schema": json.dumps(schema)}).encode(),
        {"Content-Type": "application/vnd.schemaregistry.v1+json"},
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        return int(json.load(response)["id"])


def schema_of(stack: LocalStack, number: int) -> str:
    url = f"{stack.registry_url}/schemas/ids/{number}"
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(json.loads(json.load(response)["schema"]))


def test_second_up_finds_the_first_and_down_leaves_only_data(state: Path) -> None:
    assert find(state) is None
    stack = up_on_free_ports(state)

    assert up(state) == find(state) == stack
    with pytest.raises(UsageError, match="already runs on port"):
        up(state, kafka_port=free_port())
    processes = [ProcessId.of(pid) for pid in (stack.kafka_pid, stack.registry_pid)]
    make_topic(stack, "kept")
    assert "Unrecognized configuration" not in (state / "logs/registry.log").read_text()

    assert down(state)

    assert not any(process and process.alive for process in processes)
    assert find(state) is None
    assert not (state / record.FILE).exists()
    assert not down(state)
    assert "kept" in topics(up_on_free_ports(state))
    assert down(state, wipe=True)
    assert [path.name for path in state.iterdir()] == ["stack.lock"]


def test_concurrent_ups_give_one_stack(state: Path) -> None:
    ports = free_port(), free_port()
    found: list[LocalStack] = []

    def bring_up() -> None:
        found.append(up(state, kafka_port=ports[0], registry_port=ports[1]))

    threads = [threading.Thread(target=bring_up) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 2
    assert found[0] == found[1]


def test_dead_server_is_restarted_on_its_port_and_data(state: Path) -> None:
    first = up_on_free_ports(state)
    make_topic(first, "kept")
    kill_9(first.kafka_pid)
    assert find(state) is None

    second = up(state)

    assert second == replace(first, kafka_pid=second.kafka_pid)
    assert second.kafka_pid != first.kafka_pid
    assert "kept" in topics(second)

    number = register(second, "subject", "long")
    for pid in (second.registry_pid, second.kafka_pid):  # as after a reboot
        kill_9(pid)

    third = up(state)

    assert third.bootstrap_servers == first.bootstrap_servers
    assert third.registry_url == first.registry_url
    assert "kept" in topics(third)
    assert schema_of(third, number) == "long"


def test_schema_ids_survive_a_kill_the_moment_they_are_given(state: Path) -> None:
    stack = up_on_free_ports(state)
    given: dict[int, str] = {}
    for schema in ("string", "bytes"):
        given[register(stack, f"subject-{schema}", schema)] = schema
        kill_9(stack.registry_pid)
        stack = up(state)

    assert len(given) == 2
    assert {number: schema_of(stack, number) for number in given} == given
    assert register(stack, "subject-bytes", "bytes") in given


def test_taken_port_is_named_and_nothing_is_left(state: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port}, wanted for Kafka, is taken"):
            up(state, kafka_port=port, registry_port=free_port())

    assert find(state) is None
    assert not (state / record.FILE).exists()


def test_ports_that_are_taken_as_the_servers_start_are_replaced(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        chosen = iter([port, port])
        monkeypatch.setattr(detached, "free_port", lambda *_: next(chosen, None) or free_port())
        stack = up(state, kafka_port=0, registry_port=0)

    assert next(chosen, None) is None
    make_topic(stack, "served")
    assert str(port) not in stack.bootstrap_servers + stack.registry_url


def test_failing_start_shows_the_log_and_leaves_nothing(state: Path) -> None:
    (state / "kafka").mkdir(parents=True)
    (state / "kafka" / "meta.properties").write_text("version=1\nnode.id=7\ncluster.id=other\n")
    ports = free_port(), free_port()

    with pytest.raises(DependencyError, match=r"Kafka ended while(?s:.*)kafka\.log(?s:.*)node"):
        up(state, kafka_port=ports[0], registry_port=ports[1])

    assert not (state / record.FILE).exists()
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)


def test_stack_ends_with_its_owner_even_on_kill_9(state: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(state)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert "up\n" in iter(owner.stdout.readline, "")
        stack = record.load(state)
        found = find(state)
        assert found is not None
        assert found.owner_pid == owner.pid
        assert up(state) == found  # a second user changes no owner
        owner.kill()

    processes = [stack.guard, *(server.process for server in stack.servers.values())]
    for process in processes:
        assert process is not None
        assert wait_for_exit(process, 60)
    assert not (state / record.FILE).exists()


def test_stack_outlives_its_owner_until_its_holders_have_ended(state: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(state)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert "up\n" in iter(owner.stdout.readline, "")
        with subprocess.Popen(  # once it is up: a service is started by who has the stack
            [sys.executable, "-c", HOLDER, str(state)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            stack = record.load(state)
            owner.kill()
            assert owner.wait(10) == -signal.SIGKILL

            broker = stack.servers["kafka"].process
            assert not wait_for_exit(broker, 2)
            holder.communicate(timeout=10)

    assert wait_for_exit(broker, 60)
    assert stack.guard is not None
    assert wait_for_exit(stack.guard, 60)


def test_ctrl_c_while_starting_leaves_no_process(state: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(state)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        assert any(line.startswith("starting") for line in owner.stdout)
        while not (stack := record.load(state)).servers:
            assert owner.poll() is None
        owner.send_signal(signal.SIGINT)
        _, errors = owner.communicate(timeout=60)

    assert "KeyboardInterrupt" in errors
    assert not any(server.process.alive for server in stack.servers.values())
    assert stack.guard is not None
    assert not stack.guard.alive
    assert not (state / record.FILE).exists()


def test_ctrl_c_as_the_stack_is_up_leaves_nothing(state: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C_AS_IT_IS_UP, str(state)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert done.stdout == "up\n", done.stderr
    assert "KeyboardInterrupt" in done.stderr
    assert not (state / record.FILE).exists()
    assert find(state) is None
    assert not down(state)


def test_headrace_up_ends_on_sigint_even_if_started_with_it_ignored(state: Path) -> None:
    ports = "--kafka-port", str(free_port()), "--registry-port", str(free_port())
    command = [
        sys.executable,
        "-m",
        "headrace",
        "up",
        "--state",
        str(state),
        *ports,
    ]
    # As a shell starts a job in the background.
    with subprocess.Popen(
        ["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as started:  # fmt: skip
        assert started.stderr is not None
        assert any(line.startswith("starting") for line in started.stderr)
        started.send_signal(signal.SIGINT)
        out, errors = started.communicate(timeout=60)

    assert (started.returncode, out) == (130, ""), errors
    assert errors.splitlines()[-1] == "interrupted"
    assert not (state / record.FILE).exists()


def test_ctrl_c_before_the_stack_starts_ends_the_run_without_it(state: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C_BEFORE_THE_STACK, str(state)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert done.returncode == 130, done.stderr
    assert "starting Kafka" not in done.stderr
    assert "interrupted" in done.stderr.splitlines()[-1]
    assert not (state / record.FILE).exists()


def test_damaged_jar_is_fetched_again_and_a_wrong_one_refused(tmp_path: Path) -> None:
    pins = jars.load_pins()
    smallest = next(jar for jar in pins.kafka if jar.name == "slf4j-simple")
    lines: list[str] = []

    def fetch(sha256: str) -> jars.Jars:
        wanted = replace(pins, kafka=(replace(smallest, sha256=sha256),))
        return jars.kafka_jars(wanted, tmp_path, lines.append, threading.Event())

    first = fetch(smallest.sha256)
    assert first.fetched
    assert not fetch(smallest.sha256).fetched
    with first.class_path[0].open("r+b") as jar:
        jar.write(b"x")

    again = fetch(smallest.sha256)

    assert again.fetched
    assert jars.file_sha256(again.class_path[0]) == smallest.sha256
    assert len(lines) == 2
    with pytest.raises(DependencyError, match=f"{smallest.sha256}, but {'0' * 64} is pinned"):
        fetch("0" * 64)
