"""A real Prometheus of Debian's package, with a client of its HTTP API."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_S = 60.0


class Prometheus:
    """A Prometheus that runs."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of the API."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=30) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextmanager
def running(
    unpacked: Path, folder: Path, port: int, targets: Sequence[str], rules: Path
) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the targets each second as the job `headrace`."""
    configuration = folder / "prometheus.json"  # JSON is YAML
    scraped = {"job_name": "headrace", "static_configs": [{"targets": list(targets)}]}
    configuration.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(rules)],
                "scrape_configs": [scraped],
            }
        )
    )
    arguments = [
        *("setpriv", "--pdeathsig", "TERM", str(unpacked / "usr/bin/prometheus")),
        *("--config.file", str(configuration), "--storage.tsdb.path", str(folder / "data")),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = folder / "prometheus.log"
    with log.open("wb") as out, subprocess.Popen(arguments, stdout=out, stderr=out) as process:
        try:
            prometheus, until = Prometheus(port), time.monotonic() + START_S
            while not prometheus.ready():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.1)
            yield prometheus
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
