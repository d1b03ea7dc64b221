"""A real OpenTelemetry collector accepts the spans of a run, and passes all of them on."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.infra.local.detached import free_port
from tests.integration.test_run_exports import SOME, collector, headrace

SOURCES = Path(__file__).parent / "otel_collector"
BUILD_S = 1_200
STARTED_S = 60.0
PASSED_ON_S = 60.0
CONFIG = """
receivers:
  otlp:
    protocols:
      http:
        endpoint: 127.0.0.1:{port}
exporters:
  otlphttp:
    traces_endpoint: {destination}
    compression: none
service:
  telemetry:
    metrics:
      level: none
  pipelines:
    traces:
      receivers: [otlp]
      exporters: [otlphttp]
"""


@pytest.fixture
def variables(exported: dict[str, str]) -> dict[str, str]:
    """The environment of commands that see a finished run."""
    return exported


@contextmanager
def real_collector(program: Path, folder: Path, destination: str) -> Iterator[str]:
    """Runs the collector. Yields its URL for traces, which it passes on to `destination`."""
    port, config, log = free_port(), folder / "config.yaml", folder / "collector.log"
    config.write_text(CONFIG.format(port=port, destination=destination))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, "--config", f"file:{config}"], stdout=output, stderr=output
        )
    try:
        until = time.monotonic() + STARTED_S
        while True:
            assert process.poll() is None, log.read_text()
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1/traces"
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("go") is None, reason="this machine has no Go")
def test_a_real_collector_accepts_the_spans(variables: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "collector"
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly"}
    subprocess.run(
        ["go", "build", "-buildvcs=false", "-o", program, "."],
        cwd=SOURCES, env=environment, check=True, timeout=BUILD_S,
    )  # fmt: skip
    export = ("trajectories", "--format", "otlp", *SOME, "--content", "--to")
    with collector() as (url, spans):
        headrace(variables, *export, url)
        direct = {(span.trace_id, span.span_id): span.SerializeToString() for span in spans}
    with collector() as (url, spans), real_collector(program, tmp_path, url) as real:
        headrace(variables, *export, real)
        until = time.monotonic() + PASSED_ON_S
        while len(spans) < len(direct) and time.monotonic() < until:
            time.sleep(0.1)
        passed = {(span.trace_id, span.span_id): span.SerializeToString() for span in spans}
    assert passed == direct
