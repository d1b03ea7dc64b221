"""`headrace run` with a tenant that has keys: without one of them it does not begin."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.errors import UsageError
from headrace.services.log.request_signatures import REQUEST_KEY
from headrace.services.log.signatures import public_text, write_private_key
from headrace.services.operate.cli import cli
from headrace.services.operate.run import run


@pytest.mark.parametrize("named", [None, "other", "mine"])
def test_a_run_that_could_not_submit_its_tasks_does_not_begin(
    named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Began(Exception):
        pass

    def begin(*_: object, **__: object) -> None:
        raise Began

    monkeypatch.setattr(run, "LocalRun", begin)
    files = {name: tmp_path / f"{name}.pem" for name in ("mine", "other")}
    keys = {name: public_text(write_private_key(file)) for name, file in files.items()}
    words = ["run", "null", "--state", str(tmp_path / "state"), "--set", "tasks.tenant=mine"]
    words += ["--set", f'scheduler.tenants.mine.keys=["{keys["mine"]}"]']
    environment = {REQUEST_KEY: None if named is None else str(files[named])}
    error = CliRunner().invoke(cli, words, env=environment).exception
    if named == "mine":
        assert isinstance(error, Began), error
    else:
        assert isinstance(error, UsageError), error
        assert "this run could not submit its own tasks" in str(error)
        assert REQUEST_KEY in str(error)
