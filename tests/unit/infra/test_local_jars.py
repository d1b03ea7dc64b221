"""The table of pinned jars, and the cache's digests."""

from __future__ import annotations

import hashlib
import os
import socket
import tarfile
import threading
import time
from pathlib import Path

import pytest

from headrace.errors import HeadraceError
from headrace.infra.local import jars
from headrace.infra.local.detached import Cancelled, locked

KAFKA = f"{'a' * 64}  org.apache.kafka:kafka_2.13:jar:4.3.1"
REGISTRY = f"{'b' * 64}  io.apicurio:apicurio-registry-app:tar.gz:all:3.0.9"
TREE = f"{'c' * 64}  {jars.REGISTRY_FOLDER}/"


def test_table_is_read_in_order_without_its_comments() -> None:
    pins = jars.parse_pins(f"# a comment\n\n{KAFKA}\n{REGISTRY}\n{TREE}\n")

    assert [jar.file_name for jar in pins.kafka] == ["kafka_2.13-4.3.1.jar"]
    assert pins.kafka[0].sha256 == "a" * 64
    assert pins.registry.file_name == "apicurio-registry-app-3.0.9-all.tar.gz"
    assert pins.registry_tree == "c" * 64


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        (f"{KAFKA[1:]}\n{REGISTRY}\n{TREE}", "line 1: .* is not the SHA-256"),
        (
            f"{KAFKA}\n{'A' * 64}  x:y:jar:1\n{REGISTRY}\n{TREE}",
            "line 2: .* is not the SHA-256",
        ),
        (
            f"{KAFKA}\n{'d' * 64}  kafka.jar\n{REGISTRY}\n{TREE}",
            "line 2: .* is not the SHA-256",
        ),
        (f"{KAFKA}\n{REGISTRY}", "headrace.infra.local.pin"),
        (f"{REGISTRY}\n{TREE}", "headrace.infra.local.pin"),
        (f"{KAFKA}\n{REGISTRY}\n{REGISTRY}\n{TREE}", "headrace.infra.local.pin"),
    ],
)
def test_damaged_table_is_refused_by_line(table: str, complaint: str) -> None:
    with pytest.raises(HeadraceError, match=complaint):
        jars.parse_pins(table)


def test_shipped_table_pins_the_versions_in_use() -> None:
    pins = jars.load_pins()

    names = [jar.file_name for jar in pins.kafka]
    assert names[0] == f"kafka_2.13-{jars.KAFKA_VERSION}.jar"
    assert len(set(names)) == len(names) == 46
    assert pins.registry.version == jars.REGISTRY_VERSION


def test_tree_digest_sees_bytes_names_and_additions(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.jar").write_bytes(b"a")
    digest = jars.tree_sha256(tmp_path)

    assert (
        digest
        == hashlib.sha256(f"lib/a.jar  {hashlib.sha256(b'a').hexdigest()}\n".encode()).hexdigest()
    )
    (tmp_path / "lib" / "a.jar").write_bytes(b"b")
    changed = jars.tree_sha256(tmp_path)
    (tmp_path / "lib" / "a.jar").write_bytes(b"a")
    (tmp_path / "lib" / "b.jar").write_bytes(b"")
    added = jars.tree_sha256(tmp_path)
    assert len({digest, changed, added, jars.tree_sha256(tmp_path / "absent")}) == 4


def test_cache_lies_outside_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")

    assert jars.cache_folder({}) == Path("/home/ada/.cache/headrace")
    assert jars.cache_folder({"XDG_CACHE_HOME": "/var/cache"}) == Path("/var/cache/headrace")
    assert jars.cache_folder({"XDG_CACHE_HOME": "here"}) == Path("/home/ada/.cache/headrace")


def test_an_archive_is_unpacked_by_any_python_as_files_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def foreign(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 12345
        member.uname = member.gname = "nobody"
        return member

    (tmp_path / "jar").write_bytes(b"bytecode")
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "jar", "app/lib/jar", filter=foreign)

    jars.unpack(tmp_path / "archive.tar.gz", tmp_path / "with-filters")
    monkeypatch.delattr(tarfile, "data_filter", raising=False)  # as before Python 3.11.4
    jars.unpack(tmp_path / "archive.tar.gz", tmp_path / "without")

    for folder in ("with-filters", "without"):
        jar = tmp_path / folder / "app" / "lib" / "jar"
        assert jar.read_bytes() == b"bytecode"
        assert (jar.stat().st_uid, jar.stat().st_gid) == (os.getuid(), os.getgid())


def test_who_waits_for_another_to_fetch_can_give_up(tmp_path: Path) -> None:
    pins = jars.parse_pins(f"{KAFKA}\n{REGISTRY}\n{TREE}\n")
    cancelled = threading.Event()
    cancelled.set()
    for fetch, folder in (
        (jars.kafka_jars, f"kafka-{jars.KAFKA_VERSION}"),
        (jars.registry_jars, jars.REGISTRY_FOLDER),
    ):
        with locked(tmp_path / f"{folder}.lock", 1), pytest.raises(Cancelled):
            fetch(pins, tmp_path, print, cancelled)


def test_a_download_that_stalls_can_be_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = jars.parse_pins(f"{KAFKA}\n{REGISTRY}\n{TREE}\n")
    cancelled, given_up = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{silent.getsockname()[1]}")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)

        def answer_nothing() -> None:
            with silent.accept()[0] as connection:
                connection.recv(1)
                cancelled.set()
                given_up.wait(60)

        proxy = threading.Thread(target=answer_nothing)
        proxy.start()
        began = time.monotonic()
        with pytest.raises(Cancelled):
            jars.kafka_jars(pins, tmp_path, print, cancelled)
        assert time.monotonic() - began < jars._FETCH_TIMEOUT_S
        given_up.set()
        proxy.join()
