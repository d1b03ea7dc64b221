"""`stack.json`, the broker's properties, and start-up archives."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceError
from headrace.infra.local import find
from headrace.infra.local import java_runtime as runtime
from headrace.infra.local import kafka_server as kafka
from headrace.infra.local import stack_record as record
from headrace.infra.local.detached import ProcessId

process_ids = st.builds(ProcessId, st.integers(1, 2**22), st.text(max_size=20))
servers = st.builds(
    record.Server,
    process=process_ids,
    version=st.text(max_size=8),
    port=st.integers(1, 65_535),
    ready=st.booleans(),
    recording=st.none() | st.text(max_size=20).map(Path),
)
stacks = st.builds(
    record.Stack,
    servers=st.dictionaries(st.sampled_from(["kafka", "registry"]), servers),
    owner=st.none() | process_ids,
    guard=st.none() | process_ids,
)


@given(stacks)
def test_stack_survives_its_file(stack: record.Stack) -> None:
    with TemporaryDirectory() as folder:
        record.save(Path(folder), stack)
        assert record.load(Path(folder)) == stack


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"servers": {"kafka": {}}, "owner": null, "guard": null}',
        '{"servers": {}, "owner": null, "guard": null, "more": 1}',
    ],
)
def test_damaged_file_says_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / record.FILE).write_text(text)

    with pytest.raises(HeadraceError, match=f"stack.json is damaged.*{tmp_path}"):
        record.load(tmp_path)


def running_stack() -> record.Stack:
    """A stack whose servers are this very process."""
    me = ProcessId.of(os.getpid())
    assert me is not None
    server = record.Server(me, "1", 1234, ready=True, recording=None)
    servers: dict[record.ServerName, record.Server] = {
        "kafka": server,
        "registry": replace(server, port=4321),
    }
    return replace(record.NOTHING, servers=servers)


def test_running_stack_is_found(tmp_path: Path) -> None:
    record.save(tmp_path, running_stack())

    found = find(tmp_path)

    assert found is not None
    assert found.bootstrap_servers == "127.0.0.1:1234"
    assert found.registry_url == "http://127.0.0.1:4321/apis/ccompat/v7"
    assert (found.kafka_pid, found.owner_pid) == (os.getpid(), None)


@pytest.mark.parametrize("lacking", ["file", "start", "readiness", "server"])
def test_stale_stack_is_not_found(tmp_path: Path, lacking: str) -> None:
    stack = running_stack()
    server = stack.servers["kafka"]
    if lacking == "start":  # the pid is another process's now
        server = replace(server, process=replace(server.process, started="long ago"))
    if lacking == "readiness":
        server = replace(server, ready=False)
    others: dict[record.ServerName, record.Server] = (
        {} if lacking == "server" else {"kafka": server}
    )
    if lacking != "file":
        registry = stack.servers["registry"]
        record.save(tmp_path, replace(stack, servers={"registry": registry, **others}))

    assert find(tmp_path) is None


def test_broker_listens_on_loopback_alone_and_takes_8_mib_messages() -> None:
    lines = kafka.render_properties(19092, 19093, "kafka").splitlines()
    settings = dict(line.split("=", 1) for line in lines)

    assert len(settings) == len(lines)
    assert settings["listeners"] == "PLAINTEXT://127.0.0.1:19092,CONTROLLER://127.0.0.1:19093"
    assert settings["advertised.listeners"] == "PLAINTEXT://127.0.0.1:19092"
    assert settings["controller.quorum.voters"] == "1@127.0.0.1:19093"
    assert settings["log.dirs"] == "kafka"
    assert settings["message.max.bytes"] == settings["replica.fetch.max.bytes"] == "8388608"
    assert settings["transaction.max.timeout.ms"] == "60000"
    assert int(settings["group.min.session.timeout.ms"]) <= 3000
    assert settings["auto.create.topics.enable"] == "false"


def prepare(cache: Path, java: str = "/java", *, may_record: bool = True) -> runtime.JavaRuntime:
    return runtime.prepare(
        "kafka", Path(java), (Path("/a.jar"),), ("-Xmx1m",), cache, may_record=may_record
    )


def test_archive_is_recorded_once_and_then_used(tmp_path: Path) -> None:
    first = prepare(tmp_path)
    assert first.recording is not None
    assert f"-XX:AOTCacheOutput={first.recording}" in first.command(tmp_path, "kafka", ["Main"])
    first.recording.write_bytes(b"classes")
    runtime.keep_recording(first.recording, whole=True)

    second = prepare(tmp_path)

    assert second.recording is None
    assert second.archive.read_bytes() == b"classes"
    command = second.command(tmp_path, "kafka", ["Main"])
    assert f"-XX:AOTCache={second.archive}" in command
    assert command[-3:] == ["-cp", "/a.jar", "Main"]
    assert prepare(tmp_path, "/other/java").archive != second.archive
    assert prepare(tmp_path, "/other/java", may_record=False).recording is None


def test_archive_cut_short_is_dropped(tmp_path: Path) -> None:
    run = prepare(tmp_path)
    assert run.recording is not None
    run.recording.write_bytes(b"cla")
    run.recording.with_name(f"{run.recording.name}.config").write_bytes(b"")

    runtime.keep_recording(run.recording, whole=False)

    assert list(run.archive.parent.iterdir()) == []


def test_old_archives_give_way(tmp_path: Path) -> None:
    made = []
    for number in range(6):
        run = prepare(tmp_path, f"/java{number}")
        assert run.recording is not None
        run.recording.write_bytes(b"")
        os.utime(run.recording, (number, number))
        runtime.keep_recording(run.recording, whole=True)
        made.append(run.archive)

    assert [archive.exists() for archive in made] == [False, False, True, True, True, True]
