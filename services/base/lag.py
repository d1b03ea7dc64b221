"""Measures how many records a process has not read yet, by topic, for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Gauge

LAG = Gauge(
    "headrace_lag_records",
    "Records between what this process has read and the end of its partitions, as it last saw it.",
    ["topic"],
)


class Lag:
    """The share of one consumer in `LAG`. Several consumers of a process may read one topic."""

    def __init__(self) -> None:
        self._shown: dict[str, int] = {}

    def show(self, lag: Mapping[str, int]) -> None:
        """Replaces what this consumer has added to `LAG` by these numbers of records by topic."""
        for topic in self._shown.keys() | lag.keys():
            LAG.labels(topic).inc(lag.get(topic, 0) - self._shown.get(topic, 0))
        self._shown = dict(lag)
