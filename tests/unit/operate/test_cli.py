"""The command line without a broker: help, errors, exit codes, recipes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import click
import pytest

from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.topics import RETENTION_MS, Kept
from headrace.services.namespace.cluster_config import RECIPES, ClusterConfig
from headrace.services.operate import cli
from headrace.services.operate.topics import command as topics_command

COMMANDS = (
    "new", "run", "check", "plan", "try", "end", "serve", "up", "down", "apply", "submit", "cancel",
    "quota", "autoscale", "sft", "evaluate", "export", "chat", "replay", "compare", "plot",
    "track", "trajectories", "status",
    "dashboard", "doctor", "verify", "cost", "show", "tail", "topics", "asyncapi",
    "dead-letters", "audit", "prune", "recipe", "keys", "acls",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BOOTSTRAP_SERVERS", "REGISTRY_URL", "NAMESPACE", "STATE", "DEBUG"):
        monkeypatch.delenv(f"HEADRACE_{name}", raising=False)


def run(*arguments: str) -> int:
    return cli._run(list(arguments))


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys, headrace.services.operate.cli;"
        "print([m for m in ('pydantic', 'rich', 'fastavro', 'confluent_kafka', 'torch', 'asyncio',"
        " 'prometheus_client') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    listed = [name for name, command in cli.cli.commands.items() if not command.hidden]
    assert tuple(listed) == COMMANDS
    shown = capsys.readouterr().out
    assert all(f"\n  {name}" in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_has_examples(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, "--help") == 0
    shown = capsys.readouterr().out
    assert "Examples:" in shown
    assert f"headrace {name}" in shown
    assert "Exit codes:" in shown
    command = cli.cli.commands[name]
    options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    assert all(option.help for option in options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runn"], "No such command"),
        (["run", "nope"], "no recipe 'nope'"),
        (["run", "null", "--set", "no.such=1"], "no.such: no such key|no: no such key"),
        (["run", "null", "--check", "speed>1"], "a check is one of"),
        (["run", "null", "--namespace", "A B"], "lower-case"),
        (["run", "null", "--namespace", "kafka"], "uses that name"),
        (["status", "--registry-url", "http://x"], "give both or neither"),
        (["status", "--bootstrap-servers", "x:9092"], "give both or neither"),
        (["serve", "baker", "null"], "is not one of"),
        (["serve", "agent", "null", "--policy", "default"], "--policy is only for"),
        (["serve", "trainer", "null", "--policy", "nope"], "no policy 'nope'"),
        (["apply", "null", "--kafka-property", "x"], "key=value"),
        (["recipe", "--set", "a=1"], "NAME"),
        (["recipe", "--schema", "null"], "no NAME"),
        (["cancel"], "name the tasks"),
        (["cancel", "1", "--all-queued"], "name the tasks"),
        (["cancel", "query-1"], "is not a task number"),
        (["show", "nonsense"], "These are the ids"),
        (["dead-letters", "redrive"], "--all"),
        (["dead-letters", "redrive", "--all", "1"], "--all"),
    ],
)
def test_usage_errors_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert any(part in captured.err for part in message.split("|"))
    assert "Traceback" not in captured.err


def test_no_broker_exits_75(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", "--state", str(tmp_path / "none")) == 75
    assert "headrace up" in capsys.readouterr().err


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    from headrace.errors import DependencyError

    with pytest.raises(DependencyError):
        run("--debug", "status", "--state", str(tmp_path / "none"))


NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups") if os.getuid() == 0 else ()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run null", "up", "down"])
def test_a_folder_without_permission_is_a_usage_error(command: str) -> None:
    root = Path(__file__).parents[3]
    with tempfile.TemporaryDirectory() as name:  # others may look into its parents
        folder = Path(name)
        (folder / ".headrace").mkdir()
        (folder / ".headrace").chmod(0o555)
        folder.chmod(0o555)
        done = subprocess.run(
            [*NOBODY, sys.executable, "-m", "headrace", *command.split()], cwd=folder,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(root), "HOME": "/tmp"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: can't use ")
    assert "Permission denied. This user may not write there" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_state_folder_within_a_file_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for command in ("up", "status"):
        assert run(command, "--state", str(tmp_path / "file" / "x")) == 2
        assert "Not a directory. Name another path" in capsys.readouterr().err
    with pytest.raises(NotADirectoryError):
        run("--debug", "status", "--state", str(tmp_path / "file" / "x"))


def test_only_what_the_file_system_refuses_is_no_bug() -> None:
    assert cli._failure(FileNotFoundError(errno.ENOENT, "none", "file")) is None
    assert cli._failure(PermissionError(errno.EPERM, "no")) is None
    full = cli._failure(OSError(errno.ENOSPC, "full", "file"))
    assert full is not None
    assert (full.exit_code, str(full).partition(".")[0]) == (75, "can't use file: full")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_a_full_output_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "headrace", "recipe", "null"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 75
    assert done.stderr.startswith("error: can't write the output or a file: No space left")
    assert len(done.stderr.splitlines()) == 1


def test_tasks_that_are_not_utf_8_are_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks").write_bytes(b"\xff\xfe")
    assert run("submit", str(tmp_path / "tasks")) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err


def test_input_that_is_not_utf_8_is_a_usage_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "try", "quickstart"],
        input=b"\xff\n", capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert b"error: the input is not UTF-8 text" in done.stderr


@pytest.mark.parametrize(("kept", "spelt"), [("hour", "1 h"), ("days", "7 days")])
def test_retention_is_spelt(kept: Kept, spelt: str) -> None:
    assert topics_command._spell(RETENTION_MS[kept]) == spelt


def test_down_without_a_stack_is_done(tmp_path: Path) -> None:
    assert run("down", "--state", str(tmp_path / "none")) == 0


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_a_shipped_recipe_prints_as_it_is_read(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("recipe", path.stem, "--json") == 0
    as_json = parse_recipe(json.loads(capsys.readouterr().out), "json")
    assert run("recipe", path.stem) == 0
    as_toml = parse_recipe(tomllib.loads(capsys.readouterr().out), "toml")

    assert as_json == as_toml
    assert as_json.name == path.stem  # else its namespace has another name than the recipe
    assert as_json.description


def test_the_schema_of_recipes_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("recipe", "--schema") == 0
    assert json.loads(capsys.readouterr().out)["required"] == ["name", "policies"]


def test_overrides_reach_the_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE__SCHEDULER__LIVE_EPISODES", "7")
    assert run("recipe", "null", "--json", "--set", "stop.versions=3") == 0
    tree = json.loads(capsys.readouterr().out)
    assert (tree["scheduler"]["live_episodes"], tree["stop"]["versions"]) == (7, 3)


def test_the_cluster_survives_the_pipe() -> None:
    cluster = ClusterConfig(
        Path("s"), "b:1", "http://r", "blobs", "name", {"security.protocol": "SSL"}
    )

    assert ClusterConfig.from_json(cluster.to_json()) == cluster
    assert "\n" not in cluster.to_json()


def test_a_recipe_with_a_literal_secret_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ("--state", str(tmp_path / "none"))
    assert run("apply", "null", *state, "--set", "agents.default.options.api_key=canary12") == 75
    captured = capsys.readouterr().err
    assert "warning: agents.default.options.api_key looks like a secret" in captured
    assert 'api_key = { env = "NAME" }' in captured
    assert "canary12" not in captured
    reference = 'agents.default.options.api_key={"env": "API_KEY"}'
    assert run("apply", "null", *state, "--set", reference) == 75
    assert "warning" not in capsys.readouterr().err


def test_the_secrets_of_a_cluster_are_known() -> None:
    properties = {
        "security.protocol": "SASL_SSL", "sasl.username": "me", "sasl.password": "a",
        "ssl.key.password": "b", "ssl.key.pem": "c", "sasl.oauthbearer.client.secret": "d",
        "sasl.oauthbearer.config": "e", "ssl.ca.location": "/ca.pem.d",
    }  # fmt: skip
    cluster = ClusterConfig(
        bootstrap_servers="b:1", registry_url="http://u:p%2F1@r,http://u:p2@s",
        blobs="s3://key:p3@bucket", kafka_properties=properties,
    )  # fmt: skip
    assert [secret for _, secret in cluster.secrets()] == [*list("abcde"), "p/1", "p2", "p3"]
    wrong = ClusterConfig(bootstrap_servers="b:1", registry_url="http://[u:p@r")
    assert list(wrong.secrets()) == []  # whoever opens the URL reports it
