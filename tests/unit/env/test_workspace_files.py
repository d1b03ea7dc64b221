"""Untrusted archives of a workspace: only plain files that match come out, within limits."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from random import Random

import pytest

from headrace.schemas.recipe.task_settings import Artifacts
from headrace.services.env.sandbox.workspace_copy import UnsafeArchive, clean_archive
from headrace.services.env.sandbox.workspace_files import _pack_files, choose_files

LIMITS = Artifacts(files=3, file_mb=1, episode_mb=2)


def archive(*members: tuple[str, bytes | int, bytes]) -> io.BytesIO:
    """Of (name, content or length, type)."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:", format=tarfile.GNU_FORMAT) as packed:
        for name, content, kind in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            data = bytes(content) if isinstance(content, int) else content
            if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                member.linkname = data.decode()
                packed.addfile(member)
            else:
                member.size = len(data)
                packed.addfile(member, io.BytesIO(data))
    made.seek(0)
    return made


FILE, LINK, HARD, PIPE, DEVICE, FOLDER = (
    tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE,
    tarfile.DIRTYPE,
)  # fmt: skip


def test_plain_files_that_match_come_out_sorted() -> None:
    packed = archive(
        ("./out", b"", FOLDER),
        ("./out/b", b"2", FILE),
        ("./out/a", b"1", FILE),
        ("./x", b"3", FILE),
    )
    files, left_out = choose_files(packed, ["out/*"], LIMITS)
    assert dict(files) == {"out/a": b"1", "out/b": b"2"}
    assert left_out == []


def test_links_devices_and_pipes_stay() -> None:
    packed = archive(
        ("out/a", b"1", FILE),
        ("out/link", b"/etc/passwd", LINK),
        ("out/hard", b"out/a", HARD),
        ("out/pipe", b"", PIPE),
        ("out/device", b"", DEVICE),
    )
    files, left_out = choose_files(packed, ["out/*"], LIMITS)
    assert list(files) == ["out/a"]
    assert [one.partition(":")[0] for one in left_out] == [
        "out/device", "out/hard", "out/link", "out/pipe",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["/out/a", "../out/a", "out/../../a", "out/a\nb", "out/a\udcff"])
def test_names_that_lead_elsewhere_stay(name: str) -> None:
    files, _ = choose_files(archive((name, b"1", FILE)), ["**"], LIMITS)
    assert list(files) == []


def test_limits() -> None:
    size = 1 << 20
    packed = archive(
        ("a", size + 1, FILE), ("b", size, FILE), ("c", size, FILE), ("d", 1, FILE), ("e", 0, FILE)
    )
    files, left_out = choose_files(packed, ["*"], LIMITS)
    assert {name: len(data) for name, data in files.items()} == {"b": size, "c": size, "e": 0}
    assert ["file_mb" in left_out[0], "episode_mb" in left_out[1]] == [True, True]
    many = archive(*((f"f{n}", b"", FILE) for n in range(9)))
    files, left_out = choose_files(many, ["*"], LIMITS)
    assert (len(files), len(left_out)) == (3, 6)


def test_damaged_archives_are_refused_and_never_crash() -> None:
    whole = archive(*((f"out/{n}", b"x" * 700, FILE) for n in range(4))).getvalue()
    chance = Random(1)
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(chance.randrange(1, 5)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        cut = io.BytesIO(bytes(damaged[: chance.randrange(len(damaged))]))
        try:
            files, _ = choose_files(cut, ["**"], LIMITS)
        except UnsafeArchive:
            continue
        assert all(len(data) <= 1 << 20 for data in files.values())


def test_the_files_of_a_task_are_packed_with_their_folders(tmp_path: Path) -> None:
    source = tmp_path / "content"
    source.write_bytes(b"text")
    made = io.BytesIO()
    _pack_files({"a/b/c": source, "d": source}, made)
    made.seek(0)
    with tarfile.open(fileobj=made) as packed:
        members = [(one.name, one.isdir(), oct(one.mode), one.uid) for one in packed]
    assert [one[:3] for one in members] == [
        ("a", True, "0o755"),
        ("a/b", True, "0o755"),
        ("a/b/c", False, "0o644"),
        ("d", False, "0o644"),
    ]
    assert {one[3] for one in members} != {0}


def headers(kind: bytes, size: int) -> io.BytesIO:
    """An archive that begins with a header of this type and size, before its one file."""
    member = tarfile.TarInfo("././@LongLink")
    member.type, member.size = kind, size
    record = b"27 comment=all of the files\n"
    content = (record * (size // len(record) + 1))[:size]
    made = member.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-size % 512)
    return io.BytesIO(made + archive(("a", b"1", FILE)).getvalue())


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (tarfile.XGLTYPE, 27),  # it would be added to each member
        (tarfile.XHDTYPE, 1 << 20),
        (tarfile.SOLARIS_XHDTYPE, 1 << 20),
        (tarfile.GNUTYPE_LONGNAME, 1 << 20),
        (tarfile.GNUTYPE_LONGLINK, 1 << 20),
    ],
)
def test_headers_that_no_workspace_needs_are_refused(kind: bytes, size: int) -> None:
    with pytest.raises(UnsafeArchive, match="header"):
        choose_files(headers(kind, size), ["**"], LIMITS)
    with pytest.raises(UnsafeArchive, match="header"):
        clean_archive(headers(kind, size), io.BytesIO(), 1 << 20)


def test_a_folder_2_000_deep_stays() -> None:
    deep = "a/" * 2_000 + "b"
    files, _ = choose_files(archive((deep, b"1", FILE), ("c", b"2", FILE)), ["**"], LIMITS)
    assert dict(files) == {"c": b"2"}
