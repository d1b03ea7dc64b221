from __future__ import annotations

from pathlib import Path

from headrace.services.operate.run.log_notes import MOST_KINDS, POLL_BYTES, LogNotes

AT = "2026-11-22T10:00:00.000Z"


def test_each_kind_of_warning_is_shown_once(tmp_path: Path) -> None:
    notes, log = LogNotes(), tmp_path / "env.log"
    log.write_text(
        f"{AT} INFO    env serving\n{AT} WARNING env task 3 is slow\n"
        f"Traceback (most recent call last):\n{AT} ERROR   env no"
    )
    assert notes.news(tmp_path) == ["env: task 3 is slow"]
    with log.open("a") as file:
        file.write(f" room\n{AT} WARNING env task 4 is slow\n")
    assert notes.news(tmp_path) == ["env: no room"]

    moved = tmp_path / "moved"
    moved.mkdir()
    log.rename(moved / "env.log")
    assert notes.news(tmp_path) == []
    assert notes.news(moved) == []


def test_what_is_read_and_shown_is_bounded(tmp_path: Path) -> None:
    notes, log = LogNotes(), tmp_path / "agent.log"
    log.write_bytes(b"\xff" * 10 * POLL_BYTES + f"\n{AT} ERROR   agent the end\n".encode())
    assert notes.news(tmp_path) == ["agent: the end"]
    kinds = (f"{AT} ERROR   agent {chr(97 + n // 26) + chr(97 + n % 26)}\n" for n in range(200))
    log.write_text(log.read_text(errors="replace") + "".join(kinds))
    assert len(notes.news(tmp_path)) == MOST_KINDS - 1
    assert notes.news(tmp_path) == []
