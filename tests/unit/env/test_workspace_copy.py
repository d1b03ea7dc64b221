"""Archives of workspaces: what the policy may have made of them, and what is left of it."""

from __future__ import annotations

import contextlib
import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.services.env.sandbox.command_start import MIB
from headrace.services.env.sandbox.workspace_copy import UnsafeArchive, clean_archive

Entry = tuple[str, bytes, str, bytes]
"""Name, type, link's target, content."""
FILE, FOLDER = tarfile.REGTYPE, tarfile.DIRTYPE
SYMLINK, LINK = tarfile.SYMTYPE, tarfile.LNKTYPE


def archive(*entries: Entry) -> io.BytesIO:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, target, content in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.size = kind, target, len(content)
            entry.uid, entry.uname, entry.mode = 0, "root", 0o4755
            tar.addfile(entry, io.BytesIO(content))
    made.seek(0)
    return made


def cleaned(source: io.BytesIO, most_bytes: int = MIB) -> dict[str, tarfile.TarInfo]:
    target = io.BytesIO()
    clean_archive(source, target, most_bytes)
    target.seek(0)
    with tarfile.open(fileobj=target) as tar:
        return {entry.name: entry for entry in tar}


def test_files_folders_and_links_are_copied_without_owner_and_setuid() -> None:
    found = cleaned(
        archive(
            (".", FOLDER, "", b""),
            ("./a", FOLDER, "", b""),
            ("./a/f", FILE, "", b"text"),
            ("./a/" + "long" * 60, FILE, "", b""),
            ("./hard", LINK, "./a/f", b""),
            ("./soft", SYMLINK, "/etc/passwd", b""),
            ("./pipe", tarfile.FIFOTYPE, "", b""),
            ("./disk", tarfile.BLKTYPE, "", b""),
            ("./tty", tarfile.CHRTYPE, "", b""),
        )
    )
    assert list(found) == ["a", "a/f", "a/" + "long" * 60, "hard", "soft"]
    of_all = {(entry.uid, entry.uname, entry.mode) for entry in found.values()}
    assert of_all == {(65534, "", 0o755)}
    assert (found["hard"].linkname, found["soft"].linkname) == ("a/f", "/etc/passwd")


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([("../f", FILE, "", b"")], "leads out"),
        ([("a/../../f", FILE, "", b"")], "leads out"),
        ([("/tmp/f", FILE, "", b"")], "leads out"),
        ([("t", SYMLINK, "/tmp", b""), ("t/f", FILE, "", b"")], "through something"),
        ([("t", SYMLINK, "/tmp", b""), ("t", FILE, "", b"")], "twice"),
        ([("t", SYMLINK, "/tmp", b""), ("./t", FOLDER, "", b"")], "twice"),
        ([("f", FILE, "", b""), ("f/g", FILE, "", b"")], "through something"),
        ([("h", LINK, "/etc/passwd", b"")], "leads out"),
        ([("h", LINK, "f", b"")], "not a file before it"),
        ([("s", SYMLINK, "/tmp/x", b""), ("h", LINK, "s", b"")], "not a file before it"),
        ([("a/" * 2049 + "f", FILE, "", b"")], "more than 4,096 characters"),
        ([("f", FILE, "", bytes(MIB)), ("g", FILE, "", b"x")], "more than 1 MiB"),
    ],
)
def test_what_no_workspace_contains_is_refused(entries: list[Entry], why: str) -> None:
    with pytest.raises(UnsafeArchive, match=why):
        cleaned(archive(*entries))


def test_a_sparse_file_counts_with_its_holes() -> None:
    entry = tarfile.TarInfo("f")
    entry.pax_headers = {
        "GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": "f",
        "GNU.sparse.size": str(1 << 40), "GNU.sparse.map": f"{(1 << 40) - 1},1",
    }  # fmt: skip
    entry.size = 1
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(entry, io.BytesIO(b"x"))
    made.seek(0)
    with pytest.raises(UnsafeArchive, match="more than 1 MiB"):
        cleaned(made)


def test_too_many_entries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.services.env.sandbox.workspace_copy.MOST_ENTRIES", 2)
    with pytest.raises(UnsafeArchive, match="more than 2 entries"):
        cleaned(archive(*((str(number), FILE, "", b"") for number in range(3))))


WHOLE = archive(("a", FILE, "", b"x" * 3000), ("s", SYMLINK, "a", b""), ("d", FOLDER, "", b""))


@given(st.integers(0, len(WHOLE.getvalue())), st.binary(max_size=600))
def test_broken_archives_are_refused_or_harmless(at: int, put: bytes) -> None:
    text = WHOLE.getvalue()
    broken = io.BytesIO(text[:at] + put + text[at + len(put) :])
    with contextlib.suppress(UnsafeArchive):
        for name, entry in cleaned(broken).items():
            assert not name.startswith("/")
            assert ".." not in name.split("/")
            assert entry.isfile() or entry.isdir() or entry.issym() or entry.islnk()


def test_folders_at_any_depth_take_little_time() -> None:
    deep = [("a/" * depth + "f", FILE, "", b"") for depth in range(2000, 2040)]
    assert len(cleaned(archive(*deep))) == len(deep)
    with pytest.raises(UnsafeArchive, match="twice"):
        cleaned(archive(deep[0], ("a/a", FOLDER, "", b"")))
