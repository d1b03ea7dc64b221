"""The story of a training step as a page for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.schemas.events import BatchAssembled, Blob, PolicyPublished
from headrace.services.operate.readable import iso
from headrace.services.operate.show.facts import Fact
from headrace.services.operate.show.pages import (
    Part,
    Table,
    dropped_name,
    line,
    number,
    versions_range,
)
from headrace.services.operate.show.step_story import StepStory, TrainedSample

SHOWN_RUNS = 8
"""Most runs of decided tasks that a page shows."""
_SAMPLE_HEAD = (
    "sample", "reward", "ending", "turns", "tokens", "versions", "staleness", "advantage",
    "trajectory",
)  # fmt: skip


def step_page(story: StepStory) -> list[Part]:
    """Shows a version, the batch that it was trained on, and what the batch dropped."""
    page: list[Part] = [f"policy {story.policy}, version {story.version}"]
    for published in story.publications:
        page += _publication(published, story.weights)
    if not story.publications:
        page.append(line("published", "not yet"))
    if story.evaluation is not None:
        page.append(line("evaluation", str(story.evaluation)))
    if story.batch is not None:
        page += _batch(story.batch, story.samples)
    elif story.version == 0:
        page.append(line("batch", "version 0 has no batch"))
    else:
        page.append(line("batch", "no longer in the log"))
    page += [line("remark", remark) for remark in story.remarks]
    return page


def _publication(published: Fact[PolicyPublished], weights: dict[str, bool]) -> Iterable[Part]:
    event = published.event
    yield line("published", f"{event.status}  {iso(published.recorded_at)}  {published.location}")
    yield line("by", published.writer or "?")
    yield line("digest", event.digest.hex())
    if event.full is not None:
        older = event.full_version != event.version
        of = f", weights of version {event.full_version}" if older else ""
        yield line("weights", _blob(event.full, weights) + of)
    for delta in event.deltas:
        step = f"from version {delta.from_version} to {delta.to_version}"
        yield line("delta", f"{_blob(delta.blob, weights)}, {step}")
    if (adapter := event.adapter) is not None:
        yield line("adapter", f"rank {adapter.rank}, alpha {adapter.alpha:g}")
        yield line("base", _blob(adapter.base, weights))
    yield line(
        "training",
        f"{event.updates} updates in {event.step_s:.2f} s, after {event.wait_s:.2f} s of waiting "
        "for the batch",
    )
    if event.metrics:
        metrics = "  ".join(f"{name} {value:.5g}" for name, value in sorted(event.metrics.items()))
        yield line("metrics", metrics)


def _blob(blob: Blob, stored: dict[str, bool]) -> str:
    name = blob.sha256.hex()
    store = "in the blob store" if stored.get(name) else "not in the blob store"
    return f"{name}, {blob.size:,} bytes, {store}"


def _batch(fact: Fact[BatchAssembled], samples: Sequence[TrainedSample]) -> Iterable[Part]:
    batch = fact.event
    yield f"batch {batch.version}: {len(batch.samples)} samples, {len(batch.dropped)} dropped"
    yield line("assembled", f"{iso(fact.recorded_at)}  {fact.location}")
    if batch.reward_mean is not None:
        yield line("reward", f"mean {batch.reward_mean:.3f} over all tasks that the batch decided")
    yield line("tokens", f"{batch.sampled_tokens:,} sampled tokens are trained on")
    runs = ", ".join(f"{run.first}-{run.last}" for run in batch.decided[:SHOWN_RUNS])
    more = len(batch.decided) - SHOWN_RUNS
    runs += f" and {more} more" if more > 0 else ""
    yield line("decided", f"all tasks below {batch.low_mark}" + (f", and {runs}" if runs else ""))
    yield line("restart", f"would read groups from offset {batch.groups_read} on")
    rows = [_sample_row(one) for one in samples]
    if rows:
        yield Table(_SAMPLE_HEAD, rows)
    for one in samples:
        if one.gone:
            yield line("gone", f"{one.trajectory}: {one.gone}")
    if batch.dropped:
        yield "dropped"
        rows = [[dropped_name(one.task, one.sample), one.reason] for one in batch.dropped]
        yield Table(("task", "reason"), rows)


def _sample_row(one: TrainedSample) -> list[str]:
    return [
        f"{one.task}/{one.sample}" + (f" (replay {one.use})" if one.use else ""),
        "gone" if one.gone else number(one.reward),
        one.ending,
        str(one.turns),
        str(one.tokens),
        versions_range(one.versions),
        str(one.staleness),
        ", ".join(map(number, one.advantages)),
        one.trajectory,
    ]
