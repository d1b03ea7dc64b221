"""References in options become secrets, and what is said if they can't."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.services.base.redactor import REDACTOR
from headrace.services.base.reveal import MAX_BYTES, reveal

CANARY = "reveal-canary-1234"


def written(folder: Path, content: bytes, mode: int = 0o600) -> str:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_references_at_any_depth_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REVEALED", CANARY)
    path = written(tmp_path, b"file-canary-1234\n")
    options = {
        "key": {"env": "REVEALED"},
        "deep": {"list": [1, {"x": {"file": path}}, [{"env": "REVEALED"}]]},
        "env": "a text",
        "two": {"env": "REVEALED", "file": path},
        "number": {"env": 1},
    }
    before = repr(options)
    assert reveal(options, "o") == {
        "key": CANARY,
        "deep": {"list": [1, {"x": "file-canary-1234"}, [CANARY]]},
        "env": "a text",
        "two": {"env": "REVEALED", "file": path},
        "number": {"env": 1},
    }
    assert repr(options) == before
    assert REDACTOR.text(f"{CANARY} file-canary-1234") == f"[secret REVEALED] [secret {path}]"


@pytest.mark.parametrize(
    ("content", "secret"),
    [(b"line-1234\n", "line-1234"), (b"line-1234\r\n", "line-1234"), (b"a\n\n", "a\n"),
     (b" a ", " a ")],
)  # fmt: skip
def test_one_line_end_of_a_file_is_removed(tmp_path: Path, content: bytes, secret: str) -> None:
    assert reveal({"a": {"file": written(tmp_path, content)}}, "o") == {"a": secret}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"canary-\xff", "is not UTF-8 text"),
        (b"canary" * MAX_BYTES, "more than 64 KiB"),
    ],
)
def test_a_file_that_holds_no_secret_is_refused(tmp_path: Path, content: bytes, match: str) -> None:
    with pytest.raises(UsageError, match=rf"^agents\.a\.options\.key\.0: .*{match}") as raised:
        reveal({"key": [{"file": written(tmp_path, content)}]}, "agents.a.options")
    assert "canary" not in str(raised.value)
    assert raised.value.__cause__ is None


def test_what_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(reference: dict[str, Any]) -> str:
        with pytest.raises(UsageError) as raised:
            reveal({"key": reference}, "o")
        return str(raised.value)

    monkeypatch.delenv("NOT_THERE", raising=False)
    assert "o.key: the environment variable NOT_THERE is not set" in refused({"env": "NOT_THERE"})
    monkeypatch.setenv("EMPTY", "")
    assert refused({"env": "EMPTY"}) == 'o.key: { env = "EMPTY" } is empty'
    monkeypatch.setattr(os, "environ", {"BYTES": "canary-\udcff"})
    assert refused({"env": "BYTES"}) == 'o.key: { env = "BYTES" } is not UTF-8 text'
    assert "No such file" in refused({"file": str(tmp_path / "absent")})
    assert "is not a file" in refused({"file": "/dev/null"})
    os.mkfifo(tmp_path / "pipe")
    assert "is not a file" in refused({"file": str(tmp_path / "pipe")})
    assert "can't be read" in refused({"file": str(tmp_path)})


def test_a_file_that_others_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    public = tmp_path / "public"
    public.mkdir()
    path = written(public, b"warned-canary-1234", 0o644)
    for folder in (public, *public.parents):
        if folder.stat().st_uid == os.getuid() and folder.is_relative_to(tmp_path):
            folder.chmod(0o755)
    reachable = all(folder.stat().st_mode & 0o001 for folder in public.resolve().parents)
    with caplog.at_level(logging.WARNING):
        reveal({"a": {"file": path}}, "o")
        assert (f"can read the secret {path}" in caplog.text) == reachable
        caplog.clear()
        public.chmod(0o700)
        reveal({"a": {"file": path}}, "o")
        assert caplog.text == ""


def test_a_short_secret_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHORT", "pin-123")
    with caplog.at_level(logging.WARNING):
        assert reveal({"a": {"env": "SHORT"}}, "o") == {"a": "pin-123"}
    assert "too simple to be recognized" in caplog.text
    assert "pin-123" not in caplog.text
