"""`headrace dashboard` on a real broker: a live run, hostile texts, and who may ask."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from headrace.infra import local
from headrace.schemas.events import ObservationRecorded
from headrace.services.kafka.broker import Outgoing
from headrace.services.log.event_log import EventLog
from headrace.services.namespace.apply import apply
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.connect import connect
from headrace.services.namespace.lookup import topics_of
from headrace.services.operate.dashboard.http_guard import CSP, FILE_CSP
from tests.commands import cluster_variables
from tests.written_run import DIGEST, RunWriter, Size

START_S, CAUGHT_UP_S, END_S = 90.0, 60.0, 10.0
HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e<img src=x onerror=alert(2)>\x00"
LARGE = HOSTILE + "x" * (5 << 20)
RECIPE = read_recipe("quickstart")
FILES = (
    ("plot.png", b"\x89PNG not really", "image/png"),
    ("evil.html", b"<script>alert(3)</script>", "text/html"),
)


class Browser:
    """Asks one dashboard."""

    def __init__(self, url: str) -> None:
        self.url = url
        split = urlsplit(url)
        self.token = parse_qs(split.query)["token"][0]
        assert split.hostname is not None
        self.port = split.port
        self._address = (split.hostname, split.port)

    def ask(
        self, path: str, method: str = "GET", body: object = None, **headers: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Returns status, headers and body of an answer."""
        connection = http.client.HTTPConnection(*self._address, timeout=70)
        known = {"Authorization": f"Bearer {self.token}"}
        known |= {name.replace("_", "-"): value for name, value in headers.items()}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            known.setdefault("Content-Type", "application/json")
        connection.request(method, path, body=data, headers=known)
        answer = connection.getresponse()
        found = answer.status, answer.headers, answer.read()
        connection.close()
        return found

    def get(self, path: str) -> Any:
        """Returns the JSON of an answer that must be there."""
        status, headers, body = self.ask(path)
        assert status == 200, (path, status, body)
        assert headers["Content-Type"] == "application/json; charset=utf-8"
        return json.loads(body)

    def until(self, path: str, holds: Any, limit_s: float = CAUGHT_UP_S) -> Any:
        """Asks until an answer fits."""
        until = time.monotonic() + limit_s
        while not holds(found := self.get(path)):
            assert time.monotonic() < until, found
            time.sleep(0.2)
        return found

    def until_answered(self, path: str, limit_s: float = CAUGHT_UP_S) -> Any:
        """Asks until the server does not say any more that the log is not read yet."""
        until = time.monotonic() + limit_s
        while self.ask(path)[0] == 503:
            assert time.monotonic() < until
            time.sleep(0.5)
        return self.get(path)


@contextmanager
def dashboard(
    stack: local.LocalStack, namespace: str, state: Path, *options: str
) -> Iterator[tuple[Browser, subprocess.Popen[str]]]:
    """Starts the command. SIGTERM must end it in time, with nothing left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "dashboard", *options],
        env={**os.environ, **cluster_variables(stack, namespace, state)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line.startswith("http://127.0.0.1:"), (line, process.poll())
        yield Browser(line), process
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
        assert time.monotonic() - began < END_S
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


async def write(stack: local.LocalStack, namespace: str, state: Path, size: Size) -> None:
    """Makes a namespace and writes a run into it, with a hostile observation and a dead letter."""
    cluster = ClusterConfig(state, stack.bootstrap_servers, stack.registry_url)
    async with connect(cluster, "test") as connection:
        log = await connection.writing_log(topics_of(RECIPE, namespace))
        await apply(log, RECIPE)
        await RunWriter(log.send, size).write()
        files = [
            cluster.open_blobs(None).put(data, media).model_copy(update={"name": name})
            for name, data, media in FILES
        ]
        await log.send(
            ObservationRecorded(
                task=0, sample=0, call="99", index=99, digest=DIGEST, text=LARGE, run_ms=1,
                artifacts=tuple(files),
            )
        )  # fmt: skip
        await spoil(log)


async def spoil(log: EventLog) -> None:
    name = next(topic.name for topic in log.topics if topic.topic.name == "results")
    await log.broker.send(Outgoing(name, b"1", b"not an event", []))


async def what_is_there(
    stack: local.LocalStack, namespace: str, state: Path
) -> tuple[dict[Any, Any], Any]:
    """Returns the ends of all partitions, and the consumer groups of the namespace."""
    from confluent_kafka.admin import AdminClient

    cluster = ClusterConfig(state, stack.bootstrap_servers, stack.registry_url)
    async with connect(cluster, "test") as connection:
        topics = topics_of(RECIPE, namespace)
        partitions = [at for topic in topics for at in topic.all_partitions()]
        ends = await connection.broker.ends(partitions)
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers})
    groups = admin.list_consumer_groups().result()
    names = sorted(one.group_id for one in groups.valid)
    return ends, [name for name in names if name.startswith(namespace)]


def test_a_run_is_shown_and_left_alone(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    asyncio.run(write(local_stack, namespace, tmp_path, Size()))
    before = asyncio.run(what_is_there(local_stack, namespace, tmp_path))
    with dashboard(local_stack, namespace, tmp_path, "--read-only") as (browser, _):
        run = browser.until("/api/run", lambda tree: tree["index"]["caught_up"])
        check_run(browser, run)
        check_episode(browser)
        check_log_pages(browser)
        check_hostile_text(browser)
        check_files(browser)
        check_who_may_ask(browser)
        status, _, body = browser.ask("/api/actions/cancel", "POST", {"task": 1})
        assert status == 403, body
        assert browser.get("/api/session")["actions"] == []
    assert asyncio.run(what_is_there(local_stack, namespace, tmp_path)) == before


def check_run(browser: Browser, run: Any) -> None:
    assert (run["namespace"].startswith("test-"), run["state"]) == (True, "started")
    assert run["episodes"]["ended"] == 32
    assert run["tasks"] == {"submitted": 8, "ended": 8}
    assert run["episodes"]["tokens"] == 32 * 30
    series = browser.get("/api/series?names=reward,loss&points=2")
    assert (series["first"], series["versions"]) == ([0, 2], [1, 4])
    assert series["series"]["loss"]["high"] == [1.0, 1 / 3]
    assert [one["version"] for one in browser.get("/api/versions")["items"]] == [4, 3, 2, 1, 0]
    version = browser.get("/api/versions/default/2")
    assert (version["previous"], version["next"]) == (1, 3)
    assert version["samples"]["total"] == len(version["samples"]["items"])
    assert version["weights"]["files"][0]["held"] is False
    assert sum(browser.get("/api/times")["episodes"]) == 32
    tools = {one["tool"]: one for one in browser.get("/api/tools")["items"]}
    assert tools["search"]["failed"] > 0
    assert tools["read"]["failed"] == 0
    assert browser.get("/api/compare?first=1&second=2")["kind"] == "versions"
    waits = browser.until_answered("/api/waits")["waits"]
    assert all(one["cause"] for one in waits if not one["on"])
    names = [one["namespace"] for one in browser.get("/api/runs")["items"]]
    assert run["namespace"] in names


def check_episode(browser: Browser) -> None:
    found = browser.get("/api/episodes?tool=search&limit=3")
    assert len(found["items"]) == 3
    assert all("search" in one["tools"] for one in found["items"])
    more = browser.get(f"/api/episodes?tool=search&limit=3&cursor={found['next']}")
    assert {(one["task"], one["sample"]) for one in found["items"]}.isdisjoint(
        (one["task"], one["sample"]) for one in more["items"]
    )
    searched = browser.get("/api/episodes?text=LOOK IT&limit=2".replace(" ", "%20"))
    assert len(searched["items"]) == 2
    assert "look it up" in searched["items"][0]["snippet"]
    task, sample = found["items"][0]["task"], found["items"][0]["sample"]
    episode = browser.get(f"/api/episodes/{task}/{sample}")
    assert len(episode["turns"]) == 3
    assert episode["turns"][1]["parent"] == 0
    assert episode["turns"][0]["tool_calls"][0]["name"] in ("search", "read")
    assert len([one for one in episode["exchanges"] if one["answer"]]) >= 6
    assert episode["timeline"][0]["queue_s"] == 0.005
    tokens = browser.get(f"/api/episodes/{task}/{sample}/tokens?limit=7")
    assert (len(tokens["id"]), tokens["next"], tokens["total"]) == (7, 7, 33)
    assert tokens["origin"][:2] == [0, 1]
    group = browser.get(f"/api/groups/{task}")
    assert [one["sample"] for one in group["samples"]] == [0, 1, 2, 3]
    assert group["item_id"] == f"item-{task % 5}"
    assert browser.ask("/api/episodes/123456/0")[0] == 400


def check_log_pages(browser: Browser) -> None:
    topics = {one["name"]: one for one in browser.get("/api/topics")["items"]}
    assert topics["tasks"]["records"] == 8
    records = browser.get("/api/records?topic=tasks&limit=3")
    assert [one["offset"] for one in records["items"]] == [7, 6, 5]
    older = browser.get(f"/api/records?topic=tasks&limit=3&before={records['next']}")
    assert [one["offset"] for one in older["items"]] == [4, 3, 2]
    record = browser.get(f"/api/record?at={records['items'][0]['location']}")
    assert record["event"]["task_id"] == "7"
    assert browser.get("/api/dead-letters")["items"] == []
    assert browser.ask("/api/record?at=nowhere/0@1")[0] == 400
    for path in ("/api/series?points=x", "/api/episodes?order=up", "/api/versions?policy=no"):
        status, _, body = browser.ask(path)
        assert (status, bool(json.loads(body)["error"])) == (400, True)


def check_hostile_text(browser: Browser) -> None:
    """Texts stay JSON strings. The long one is cut, and its address gives all of it."""
    status, headers, body = browser.ask("/api/episodes/0/0")
    assert status == 200
    assert len(body) < 1_000_000
    assert headers["Content-Security-Policy"] == CSP
    assert headers["X-Content-Type-Options"] == "nosniff"
    exchanges = json.loads(body)["exchanges"]
    answer = next(one["answer"] for one in exchanges if one["call"] == "99")
    assert answer["text"].startswith(HOSTILE)
    assert answer["length"] == len(LARGE)
    assert browser.get(answer["more"])["text"] == LARGE


def check_files(browser: Browser) -> None:
    """An image may be shown. Everything else is a download, in a sandbox."""
    exchanges = browser.get("/api/episodes/0/0")["exchanges"]
    files = next(one["artifacts"] for one in exchanges if one["call"] == "99")
    for file, (name, data, media) in zip(files, FILES, strict=True):
        status, headers, body = browser.ask(file["url"])
        assert (status, file["name"], body) == (200, name, data)
        assert headers["Content-Security-Policy"] == FILE_CSP
        image = media == "image/png"
        assert headers["Content-Type"] == (media if image else "application/octet-stream")
        assert headers["Content-Disposition"].startswith("inline" if image else "attachment")
    other = files[0]["url"].replace("task=0", "task=1")
    assert browser.ask(other)[0] == 400


def check_who_may_ask(browser: Browser) -> None:
    exchanges = browser.get("/api/episodes/0/0")["exchanges"]
    artifact = next(one["artifacts"] for one in exchanges if one["call"] == "99")[0]["url"]
    for path in ("/api/run", "/api/session", "/api/none", "/page", artifact):
        for wrong in ("", "Bearer wrong", f"Basic {browser.token}"):
            status, headers, _ = browser.ask(path, Authorization=wrong)
            assert status == 401, path
            assert headers["Content-Security-Policy"] == CSP
    assert browser.ask("/api/run", Host="evil.example")[0] == 421
    assert browser.ask("/api/run", Origin="http://evil.example")[0] == 403
    for path in (f"/?token={browser.token}", "/", "/page/app.js"):  # They have no facts.
        status, headers, body = browser.ask(path, Authorization="")
        assert (status, headers["Set-Cookie"]) == (200, None)
        assert browser.token.encode() not in body
    for cookie in (f"headrace_{browser.port}={browser.token}", f"token={browser.token}"):
        assert browser.ask("/api/run", Authorization="", Cookie=cookie)[0] == 401
    assert browser.ask(f"/api/run?token={browser.token}", Authorization="")[0] == 401
    assert browser.ask("/page/../command.py")[0] == 404
    assert browser.ask("/page/%2e%2e/command.py")[0] == 404
    assert browser.ask("/api/actions/cancel", "POST", {"task": 1})[0] == 403


def test_a_live_run_is_followed_and_actions_need_their_token(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    asyncio.run(write(local_stack, namespace, tmp_path, Size(tasks=2)))
    asyncio.run(write(local_stack, f"{namespace}-b", tmp_path, Size(tasks=2)))
    with dashboard(local_stack, namespace, tmp_path) as (browser, _):
        browser.until("/api/run", lambda tree: tree["index"]["caught_up"])
        compared = browser.get(f"/api/compare?run={namespace}-b")
        assert [one["name"] for one in compared["runs"]] == [namespace, f"{namespace}-b"]
        assert compared["versions"] == [0, 1]
        assert compared["metrics"]["loss"][0] == compared["metrics"]["loss"][1]
        session = browser.get("/api/session")
        token = session["action_token"]
        assert browser.ask("/api/actions/again", "POST", {"task": 0})[0] == 403
        refused = browser.ask(
            "/api/actions/again", "POST", {"task": 0},
            X_Headrace_Token=token, Content_Type="text/plain",
        )  # fmt: skip
        assert refused[0] == 415

        def act(action: str, body: object) -> Any:
            status, _, answer = browser.ask(
                f"/api/actions/{action}", "POST", body, X_Headrace_Token=token
            )
            return status, json.loads(answer)

        status, answer = act("again", {"task": 0})
        assert (status, answer["task"]) == (200, 2)
        # The index follows what is written while the dashboard runs.
        browser.until("/api/run", lambda tree: tree["tasks"]["submitted"] == 3)
        status, answer = act("cancel", {"task": 2, "reason": "test"})
        assert (status, answer["ok"]) == (200, True)
        assert act("cancel", {"task": "2"})[0] == 400
        assert act("redrive", {"numbers": [5]})[0] == 400
        assert act("burn", {})[0] == 400
        assert act("evaluate", {"policy": "no", "version": 1})[0] == 400
        assert browser.get("/api/jobs")["items"] == []
