"""Everything per task on a real broker: files, environments, modes, tenants and labels.

Files go in by a data set, by `headrace submit` and by the client, and come out changed, although an
env worker is killed in the middle of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import Client, UsageError
from headrace.infra import local
from headrace.schemas.events import TaskEnded
from tests.commands import cluster_variables
from tests.integration.test_other_teams import headrace

BOUND_S = 120.0
RECIPE = """
name = "files"

[tasks]
use = "jsonl"
options = {{ path = "{folder}/items.jsonl", task_field = "task" }}
epochs = 1
samples = 2
max_turns = 4
max_tokens = 8
deadline_s = 60
labels = {{ team = "tests" }}

[scheduler.tenants.gold]
weight = 2

[environments.default]
use = "tests.integration.editor:Editor"
options = {{ marker = "{folder}/killed" }}
collect = ["out/*"]

[environments.twice]
use = "tests.integration.editor:Editor"
options = {{ marker = "{folder}/killed", lines = 2 }}

[policies.default]
model = "tiny-llama"
training = false

[policies.default.engine]
use = "scripted"
options = {{ count = 1 }}

[policies.default.sampling]
max_tokens = 1
"""
ITEMS = [
    {"id": "a", "task": {"artifacts": {"in/text": "a.txt"}, "tenant": "gold",
                         "labels": {"kind": "deadly"}}},
    {"id": "b", "task": {"artifacts": {"in/text": "b.txt"}, "environment": "twice",
                         "mode": "persistent", "collect": ["**"], "labels": {"kind": "twice"}}},
]  # fmt: skip


def test_files_go_in_and_come_out_changed_though_a_worker_is_killed(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    recipe = tmp_path / "files.toml"
    recipe.write_text(RECIPE.format(folder=tmp_path))
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, ITEMS)))
    (tmp_path / "a.txt").write_text("deadly\n")
    (tmp_path / "b.txt").write_text("b\n")
    environment = cluster_variables(local_stack, namespace, tmp_path)
    headrace(("apply", str(recipe)), environment)
    (tmp_path / "c.jsonl").write_text('{"task_id": "c", "artifacts": {"in/text": "b.txt"}}')
    headrace(
        ("submit", str(tmp_path / "c.jsonl"), "--label", "kind=flag", "--priority", "3"),
        environment,
    )
    where = (local_stack.bootstrap_servers, local_stack.registry_url, namespace)
    with Client(*where, state=tmp_path, source="client") as client:
        (sent,) = client.submit([{"artifacts": {"in/text": b"bytes\n"}, "samples": 1}])
        running = subprocess.Popen(
            [sys.executable, "-m", "headrace", "run", str(recipe), "--json", "--quiet"],
            env=environment,
            stdout=subprocess.PIPE,
        )
        try:
            summary = json.loads(running.communicate(timeout=BOUND_S)[0])
        finally:
            running.kill()
        assert (summary["tasks"], summary["failures"], summary["restarts"]) == (4, 0, 1)
        found = {result.labels.get("kind", ""): result for result in client.results()}
        assert [one.task for one in client.results(labels={"kind": "flag"})] == [0]

        def text(result: TaskEnded, sample: int = 0) -> dict[str, str]:
            outcome = next(one for one in result.outcomes if one.sample == sample)
            return {one.name: client.artifact(one).decode() for one in outcome.artifacts}

        assert text(found["deadly"]) == {"log": "sample 0", "out/text": "deadly\nline 0\n"}
        assert text(found["deadly"], 1) == {"log": "sample 1", "out/text": "deadly\nline 0\n"}
        assert text(found["twice"])["out/text"] == "b\nline 0\nline 1\n"
        assert text(found["twice"])["private"] == "not asked for"
        assert text(found["flag"])["out/text"] == "b\nline 0\n"
        assert text(found[""])["out/text"] == "bytes\nline 0\n"
        assert found[""].task == sent.number
        assert [one.tenant for one in found["deadly"].outcomes] == ["gold", "gold"]
        assert found["twice"].labels == {"team": "tests", "kind": "twice"}
        # A replayable environment is rebuilt, and its files are collected again.
        assert {one.attempts for result in found.values() for one in result.outcomes} == {1}
        known = {"in/text": found["flag"].outcomes[0].artifacts[1]}
        with pytest.raises(UsageError, match="has ended"):
            client.submit([{"artifacts": known}])
    folder = tmp_path / "fetched"
    page = headrace(("show", str(found["twice"].task), "--fetch", str(folder)), environment)
    assert "environment twice (persistent)" in page
    assert "kind=twice" in page
    assert (folder / "in/in/text").read_text() == "b\n"
    assert (folder / "1/out/text").read_text() == "b\nline 0\nline 1\n"
    page = headrace(("show", "label:kind=flag"), environment)
    assert [line.split()[:3] for line in page.splitlines()[2:]] == [
        ["0", "task:submit/c", "default"]
    ]
    episode = json.loads(headrace(("show", "0/0", "--json"), environment))
    (attempt,) = episode["episodes"][0]["attempts"]
    asked = [one["request"]["event"] for one in attempt["exchanges"] if one["request"]]
    assert [one["priority"] for one in asked if "priority" in one] == [3]
    assert [one["kind"] for one in asked if "index" in one] == ["reset", "step", "collect", "close"]
