"""`stack.json`, the broker's properties, and start-up archives."""

from __future__ import annotations

import base64
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


@pytest.mark.slow
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


def a_java(folder: Path, release: str) -> Path:
    """Makes what tells a build of Java from others."""
    for name, text in (("release", release), ("lib/modules", "m"), ("lib/server/libjvm.so", "so")):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "bin" / "java"


def test_environments_with_the_same_java_share_an_archive(tmp_path: Path) -> None:
    one, same, newer = (
        prepare(tmp_path, str(a_java(tmp_path / name, version))).archive
        for name, version in (("one", "25.0.2"), ("same", "25.0.2"), ("newer", "25.0.3"))
    )

    assert one == same != newer


def test_each_log_gets_ids_of_its_own() -> None:
    meta = "#\n#Tue\ncluster.id=HuGojoWxT1qa2FtEzGTvwQ\ndirectory.id=-x\nnode.id=1\nversion=1\n"

    made = [dict(line.split("=") for line in kafka.with_fresh_ids(meta).split()[2:]) for _ in "ab"]

    assert [one.keys() for one in made] == [
        {"cluster.id", "directory.id", "node.id", "version"}
    ] * 2
    assert all(one["node.id"] == one["version"] == "1" for one in made)
    ids = {one[name] for one in made for name in ("cluster.id", "directory.id")}
    assert len(ids) == 4
    assert all(len(base64.urlsafe_b64decode(f"{one}==")) == 16 for one in ids)


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
