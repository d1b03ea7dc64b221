"""Models of the Hugging Face Hub, by its own client, from a hub on loopback."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.services.models.weights import model_folder

REPOSITORY = "team/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FIND = """
import sys
from headrace.errors import HeadraceError
from headrace.services.models.weights import model_folder
try:
    print(model_folder(sys.argv[1], weights="weights" in sys.argv))
except HeadraceError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


PUSH = """
import sys
from pathlib import Path
from headrace.errors import HeadraceError
from headrace.services.models.hub import push_folder
try:
    print(push_folder(Path(sys.argv[1]), sys.argv[2], "Export a version"))
except HeadraceError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@dataclass
class Hub:
    """The parts of the hub's HTTP interface that fetching a model takes."""

    files: dict[str, bytes]
    served: list[str] = field(default_factory=list)
    """The files whose contents were asked for."""
    created: list[dict[str, Any]] = field(default_factory=list)
    """The repositories that were created."""
    pushed: dict[str, bytes] = field(default_factory=dict)

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        path = path.partition("?")[0]
        if REPOSITORY not in path:
            return 404, b"{}", {"X-Error-Code": "RepoNotFound"}
        if "/revision/" in path:
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}
            return 200, json.dumps(info).encode(), {}
        if "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in self.files.items()
            ]
            return 200, json.dumps(tree).encode(), {}
        name = path.rpartition(f"/resolve/{COMMIT}/")[2]
        data = self.files[name]
        return 200, data, {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT}

    def take(self, path: str, body: bytes, token: str) -> tuple[int, dict[str, Any]]:
        """Answers a POST: creates a repository, or takes a commit without large files."""
        if token != "Bearer hf_writer":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return 200, {"url": "http://127.0.0.1/team/new"}
        if path == "/api/models/team/new/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            return 200, {"files": [{"path": name, **modes} for name in names]}
        assert path == "/api/models/team/new/commit/main", path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                value = line["value"]
                self.pushed[value["path"]] = base64.b64decode(value["content"])
        url = f"http://127.0.0.1/team/new/commit/{COMMIT}"
        return 200, {"success": True, "commitOid": COMMIT, "commitUrl": url}


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[tuple[Hub, str]]:
    folder = model_folder("tiny-llama")
    shipped = {file.name: file.read_bytes() for file in folder.glob("*.json")}
    hub = Hub(shipped | {"model.safetensors": b"weights", "pytorch_model.bin": b"a pickle"})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body, headers = hub.answer(self.path)
            if status == 200 and "/resolve/" in self.path and self.command == "GET":
                hub.served.append(self.path.rpartition("/")[2])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            token = self.headers.get("Authorization", "")
            status, tree = hub.take(self.path.partition("?")[0], body, token)
            self.send_response(status)
            answer = json.dumps(tree).encode()
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_HEAD = do_GET  # noqa: N815 (the name that http.server calls)

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield hub, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def find(home: Path, url: str, *words: str) -> subprocess.CompletedProcess[str]:
    """What `model_folder` says in a process whose hub and cache are these."""
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-c", FIND, *words],
        capture_output=True, text=True, env=environment, timeout=120, check=False,
    )  # fmt: skip


def test_a_model_is_fetched_once_and_its_weights_when_they_are_wanted(
    hub: tuple[Hub, str], tmp_path: Path
) -> None:
    served = hub[0].served
    found = find(tmp_path, hub[1], REPOSITORY)
    assert found.returncode == 0, found.stderr
    folder = Path(found.stdout.strip())
    assert (folder / "tokenizer.json").read_bytes() == hub[0].files["tokenizer.json"]
    assert "config.json" in served
    assert not {"model.safetensors", "pytorch_model.bin"} & set(served)

    served.clear()
    pinned = find(tmp_path, hub[1], f"{REPOSITORY}@{COMMIT}", "weights")
    assert pinned.stdout.strip() == str(folder), pinned.stderr
    assert served == ["model.safetensors"]

    # What is in the cache needs no hub.
    again = find(tmp_path, "http://127.0.0.1:9", f"{REPOSITORY}@{COMMIT}", "weights")
    assert again.stdout.strip() == str(folder), again.stderr


def test_what_can_not_be_fetched_is_said(hub: tuple[Hub, str], tmp_path: Path) -> None:
    other = find(tmp_path, hub[1], "team/other")
    assert other.stderr.startswith("UsageError: can't fetch model team/other: the Hugging Face")

    hub[0].files = {name: data for name, data in hub[0].files.items() if name.endswith(".json")}
    bare = find(tmp_path, hub[1], REPOSITORY, "weights")
    assert "UsageError: model 'team/tiny' of the Hugging Face Hub has no *.safetensors" in (
        bare.stderr
    )

    nowhere = find(tmp_path / "empty", "http://127.0.0.1:9", REPOSITORY)
    assert nowhere.stderr.startswith("DependencyError: can't fetch model team/tiny: the Hugging")
    assert "give its path" in nowhere.stderr


def push(home: Path, url: str, token: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_TOKEN": token}
    return subprocess.run(
        [sys.executable, "-c", PUSH, *words],
        capture_output=True, text=True, env=environment, timeout=120, check=False,
    )  # fmt: skip


def test_a_folder_is_pushed_to_a_private_repository(hub: tuple[Hub, str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "base").mkdir(parents=True)
    files = {"config.json": b"{}", "model.safetensors": b"weights", "base/config.json": b"[]"}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    done = push(tmp_path, hub[1], "hf_writer", str(folder), "team/new")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("/team/new")
    assert hub[0].pushed == files
    [created] = hub[0].created
    assert (created["name"], created["organization"]) == ("new", "team")
    assert created.get("private") or created.get("visibility") == "private"

    refused = push(tmp_path, hub[1], "hf_other", str(folder), "team/new")
    assert refused.stderr.startswith("UsageError: can't push team/new: the Hugging Face")
    nowhere = push(tmp_path, "http://127.0.0.1:9", "hf_writer", str(folder), "team/new")
    assert nowhere.stderr.startswith("DependencyError: "), nowhere.stderr


def test_a_path_that_is_no_folder_is_not_taken_for_a_model_of_the_hub(tmp_path: Path) -> None:
    for path in ("./tiny", "../team/tiny", "/nowhere/tiny"):
        found = find(tmp_path, "http://127.0.0.1:9", path)
        assert found.stderr.startswith(f"UsageError: model '{path}': "), found.stderr
        assert "has no config.json" in found.stderr
