"""`headrace keys`: a key pair for signed versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.schemas.untrusted.public_keys import key_bytes
from headrace.services.operate import cli


def test_new_writes_a_private_key_and_both_print_its_public_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "key.pem"
    assert cli._run(["keys", "new", str(path)]) == 0
    made = capsys.readouterr()
    assert len(key_bytes(made.out.strip())) == 32
    assert f"HEADRACE_SIGNING_KEY={path}" in made.err
    assert path.stat().st_mode & 0o777 == 0o600
    assert cli._run(["keys", "show", str(path)]) == 0
    assert capsys.readouterr().out == made.out
    assert "PRIVATE" not in made.out + made.err


def test_new_never_replaces_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key.pem"
    path.write_text("mine")
    assert cli._run(["keys", "new", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert path.read_text() == "mine"
