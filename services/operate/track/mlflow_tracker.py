"""Writes the curves of a policy to an MLflow server, as a run of an experiment.

A server keeps a metric's value once for each name, step, time and value
(https://github.com/mlflow/mlflow/blob/master/mlflow/store/tracking/dbmodels/models.py). The points
of a version are always the same, because they come from the log. So a version that is written again
changes nothing. A tag of the run has the newest version that was written whole.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from headrace.errors import DependencyError, UsageError
from headrace.services.operate.track.tracker import Point

REQUEST_S, RETRIES = 2, 1
"""Seconds that a request may take, and how often it is repeated. The command ends sooner than 10 s
after SIGTERM, also if the server hangs."""
POLICY, NEWEST = "headrace.policy", "headrace.version"
"""Tags of a run: its policy, and the newest version that it has."""
BATCH = 1_000
"""MLflow takes at most this many metrics at once."""


class MlflowTracker:
    """The run of one policy, in the experiment that is named after the namespace."""

    def __init__(self, url: str, namespace: str, policy: str) -> None:
        """Finds or makes the experiment and the run.

        Raises UsageError if `url` is not an address, and
        DependencyError if the server fails.
        """
        if not url.startswith(("http://", "https://")):
            raise UsageError(
                f"--to {url} is not the address of an MLflow server, such as "
                "http://127.0.0.1:5000. To write into a folder, start a server on it: mlflow server"
            )
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(REQUEST_S))
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", str(RETRIES))
        os.environ.setdefault("MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER", "false")
        self._client = MlflowClient(url, url)
        self._url = url
        with self._failing():
            experiment = self._client.get_experiment_by_name(namespace)
            own = experiment.experiment_id if experiment else None
            own = own or self._client.create_experiment(namespace)
            if not (found := self._runs(own, policy)):
                self._client.create_run(own, tags={POLICY: policy}, run_name=policy)
                found = self._runs(own, policy)
        # Two, if the request was repeated: all processes choose the same one.
        self._last, self._run = max(found)

    def _runs(self, experiment: str, policy: str) -> list[tuple[int, str]]:
        """Returns the newest version and the id of each run of a policy."""
        found = self._client.search_runs([experiment], f"tags.`{POLICY}` = '{policy}'")
        return [(int(one.data.tags.get(NEWEST, -1)), one.info.run_id) for one in found]

    @property
    def last(self) -> int:
        """The newest version that the server has, -1 if it has none."""
        return self._last

    async def write(self, point: Point) -> None:
        """Writes all metrics of a version. Raises DependencyError."""
        await asyncio.to_thread(self._write, point)

    def _write(self, point: Point) -> None:
        at = round(1_000 * point.recorded_at)
        metrics = [
            Metric(name, value, at, point.version) for name, value in sorted(point.values.items())
        ]
        with self._failing():
            for start in range(0, len(metrics), BATCH):
                self._client.log_batch(self._run, metrics[start : start + BATCH])
            self._client.set_tag(self._run, NEWEST, str(point.version))
        self._last = point.version

    async def finish(self) -> None:
        """Marks the run as finished."""
        with self._failing():
            await asyncio.to_thread(self._client.set_terminated, self._run)

    async def aclose(self) -> None:
        """Does nothing: no connection stays open."""

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except MlflowException as error:
            raise DependencyError(
                f"the MLflow server {self._url} failed: {error.message}. The same command "
                "continues once it works"
            ) from None
