"""A short real run: drawn, exported as ATIF and as traces, and used from the dashboard."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from headrace.infra import local
from tests.integration.test_dashboard import dashboard

RUN_S = 240.0
SOME = ("0", "1")
"""The tasks that are exported."""


@pytest.fixture
def variables(exported: dict[str, str]) -> dict[str, str]:
    """The environment of commands that see a finished run."""
    return exported


def headrace(variables: dict[str, str], *arguments: str) -> None:
    command = [sys.executable, "-m", "headrace", *arguments]
    done = subprocess.run(
        command, env=variables, check=False, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stderr


@contextmanager
def collector() -> Iterator[tuple[str, list[Span]]]:
    """The URL of a receiver of OTLP over HTTP, and the spans that it gets."""
    spans: list[Span] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        finally:
            server.shutdown()
            thread.join()


def test_a_run_is_drawn(variables: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "run.svg"
    headrace(variables, "plot", str(file))
    text = "".join(ElementTree.parse(file).getroot().itertext())
    for expected in ("exported: policy", "mean reward", "staleness", "tokens per second"):
        assert expected in text


@pytest.mark.long
def test_the_dashboard_replays_and_evaluates_a_version(
    variables: dict[str, str], local_stack: local.LocalStack
) -> None:
    state = Path(variables["HEADRACE_STATE"])
    with dashboard(local_stack, "exported", state) as (browser, _):
        token = browser.get("/api/session")["action_token"]

        def start(action: str, version: int) -> str:
            body = {"policy": "default", "version": version}
            status, _, answer = browser.ask(
                f"/api/actions/{action}", "POST", body, X_Headrace_Token=token
            )
            assert status == 200, answer
            return str(json.loads(answer)["job"])

        def ended(number: str) -> Any:
            def has_ended(jobs: Any) -> bool:
                job = next(one for one in jobs["items"] if one["job"] == number)
                return job["ended_at"] is not None

            jobs = browser.until("/api/jobs", has_ended, RUN_S)
            return next(one for one in jobs["items"] if one["job"] == number)

        replayed = ended(start("replay", 1))
        assert replayed["state"] == "done", replayed
        assert "--until 1" in replayed["command"]
        assert "same" in replayed["output"]["text"], replayed
        evaluated = ended(start("evaluate", 1))
        assert evaluated["state"] == "done", evaluated
        assert "avg@" in evaluated["output"]["text"], evaluated
        job = start("evaluate", 2)
        body = {"policy": "default", "version": 1}
        status, _, answer = browser.ask("/api/actions/replay", "POST", body, X_Headrace_Token=token)
        assert (status, b"still runs" in answer) == (400, True)
        status, _, answer = browser.ask(
            "/api/actions/stop", "POST", {"job": job}, X_Headrace_Token=token
        )
        assert status == 200, answer
        assert ended(job)["state"] == "failed"


def test_trajectories_as_atif(variables: dict[str, str], tmp_path: Path) -> None:
    headrace(variables, "trajectories", "--format", "atif", *SOME, "--to", str(tmp_path))
    files = sorted(tmp_path.iterdir())
    assert {re.split("-", path.stem)[1] for path in files} == set(SOME)
    for path in files:
        found = json.loads(path.read_text())
        steps = found["steps"]
        assert [step["step_id"] for step in steps] == list(range(1, len(steps) + 1))
        assert [step["source"] for step in steps] == ["user"] + ["agent"] * (len(steps) - 1)
        assert steps[0]["message"]
        for step in steps[1:]:
            metrics = step["metrics"]
            sampled = metrics["completion_tokens"]
            assert len(metrics["completion_token_ids"]) == len(metrics["logprobs"]) == sampled
            assert step["message"] in "LDRU"
        for step in steps[1:-1]:
            assert step["observation"]["results"][0]["content"]
        assert found["final_metrics"]["extra"]["reward"] in (0.0, 1.0)


def test_traces_have_the_same_ids_in_every_export(variables: dict[str, str]) -> None:
    command = ("trajectories", "--format", "otlp", *SOME, "--content", "--to")
    with collector() as (url, spans):
        headrace(variables, *command, url)
        first = {(span.trace_id, span.span_id): span.SerializeToString() for span in spans}
        assert len(first) == len(spans)
        headrace(variables, *command, url)
    again = {(span.trace_id, span.span_id): span.SerializeToString() for span in spans}
    assert again == first
    assert len(spans) == 2 * len(first)
    roots = {span.trace_id: span for span in spans if not span.parent_span_id}
    kinds = {span.name.partition(" ")[0] for span in spans}
    assert kinds == {"invoke_agent", "chat", "execute_tool"}
    for span in spans:
        root = roots[span.trace_id]
        assert span.parent_span_id in (b"", root.span_id)
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
        attributes = {one.key: one.value for one in span.attributes}
        assert attributes["gen_ai.operation.name"].string_value == span.name.partition(" ")[0]
        assert attributes["gen_ai.provider.name"].string_value == "headrace"
        if span.name.startswith("chat"):
            (message,) = json.loads(attributes["gen_ai.output.messages"].string_value)
            assert message["parts"][0]["content"] in "LDRU"
            assert attributes["gen_ai.usage.output_tokens"].int_value == 1
