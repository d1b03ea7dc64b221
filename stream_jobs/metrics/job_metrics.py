"""The metrics of the stream jobs, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import Counter, Gauge

from headrace.schemas.events import BatchAssembled, GroupClosed
from headrace.services.base.lag import LAG
from headrace.services.kafka.broker import Partition
from headrace.stream_jobs.groups import EVALUATE

GROUPS = Counter(
    "headrace_groups_closed_total",
    "Groups of training tasks, by verdict: scored or dropped.",
    ["policy", "verdict"],
)
BATCH = Gauge("headrace_batch_version", "The newest batch that was assembled.", ["policy"])
SAMPLES = Counter(
    "headrace_batched_samples_total",
    "Samples that batches decided, by result: accepted, dropped, or replayed.",
    ["policy", "result"],
)
WAITING = Gauge("headrace_groups_waiting", "Closed groups that wait for a batch.", ["policy"])
LIVE = Gauge("headrace_groups_live", "Groups that were started and not closed.", ["policy"])
ITEMS = Gauge("headrace_items_measured", "Items of the data set with statistics.", ["policy"])


def note_group(group: GroupClosed) -> None:
    """Counts a group that was written."""
    if group.reason != EVALUATE:
        GROUPS.labels(group.policy, group.verdict).inc()


def note_batch(batch: BatchAssembled) -> None:
    """Counts what a batch decided."""
    BATCH.labels(batch.policy).set(batch.version)
    replayed = sum(sample.use > 0 for sample in batch.samples)
    dropped = sum(one.reason != EVALUATE for one in batch.dropped)
    SAMPLES.labels(batch.policy, "accepted").inc(len(batch.samples) - replayed)
    SAMPLES.labels(batch.policy, "dropped").inc(dropped)
    SAMPLES.labels(batch.policy, "replayed").inc(replayed)


def show_lag(
    topic: str, reached: Mapping[Partition, int], end: Callable[[Partition], int | None]
) -> None:
    """Lets each scrape compute the lag of a topic.

    `reached` has the offset of the next record to read by partition, and stays current. `end`
    returns the end of a partition, None if it is not known.
    """
    LAG.labels(topic).set_function(
        lambda: sum(max(0, (end(at) or 0) - offset) for at, offset in list(reached.items()))
    )
