"""Stories for people: lines and tables. A line without indentation is a heading."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.schemas.events import (
    ActionRequested,
    Blob,
    Failure,
    GenerationCompleted,
    GenerationRequested,
    ObservationRecorded,
    PolicyPublished,
    TaskSubmitted,
    TrajectoryRecorded,
)
from headrace.services.operate.show.facts import Fact, iso
from headrace.services.operate.show.step_story import StepStory, TrainedSample
from headrace.services.operate.show.task_story import (
    AttemptStory,
    EpisodeStory,
    Exchange,
    LearnedIn,
    TaskStory,
)
from headrace.services.operate.show.unpacked import floats_in, ids_in, versions_in

CLIP = 60
"""Most characters of a text in a task's table; an episode's own page has it whole."""

TextOf = Callable[[str, bytes, str], str | None]
"""Policy, token ids and their tokenizer's digest to text; None where that can't be told."""


@dataclass(frozen=True)
class Table:
    """Rows under a head."""

    head: tuple[str, ...]
    rows: list[list[str]]


Part = str | Table


def task_page(story: TaskStory, text_of: TextOf, *, whole: bool) -> list[Part]:
    """A task and its episodes. `whole`: texts are not cut, and every exchange is told."""
    page: list[Part] = [f"task {story.number}: {_state(story)}"]
    if story.submitted is not None:
        page += _submission(story.submitted)
    if story.result is not None:
        ended = story.result
        page.append(_line("ended", f"{iso(ended.recorded_at)}  {ended.place}"))
    for one in story.learned:
        page += _learning(story.number, one)
    if story.duplicates:
        page.append(_line("duplicates", f"{story.duplicates} records said again: not counted"))
    page += [_line("remark", line) for line in story.remarks]
    for episode in story.episodes:
        page += _episode(story, episode, text_of, whole=whole)
    return page


def step_page(story: StepStory) -> list[Part]:
    """A batch, what it trained on and dropped, and the version made of it."""
    page: list[Part] = [f"policy {story.policy}, version {story.version}"]
    for published in story.publications:
        page += _publication(published, story.weights)
    if not story.publications:
        page.append(_line("published", "not yet"))
    if story.evaluation is not None:
        page.append(_line("evaluation", str(story.evaluation)))
    if story.batch is None:
        page.append(_line("batch", "none" if story.version == 0 else "no longer in the log"))
        return page
    batch = story.batch.event
    mean = "-" if batch.reward_mean is None else f"{batch.reward_mean:.3f}"
    runs = ", ".join(f"{run.first}-{run.last}" for run in batch.decided[:8])
    more = f" and {len(batch.decided) - 8} more" if len(batch.decided) > 8 else ""
    page += [
        f"batch {batch.version}: {len(batch.samples)} samples, {len(batch.dropped)} dropped",
        _line("assembled", f"{iso(story.batch.recorded_at)}  {story.batch.place}"),
        _line("reward", f"mean {mean} of all tasks decided; {batch.sampled_tokens:,} tokens"),
        _line(
            "decided",
            f"all tasks below {batch.low_mark}" + (f", and {runs}{more}" if runs else ""),
        ),
        _line("groups read", f"to offset {batch.groups_read}"),
    ]
    if story.samples:
        page.append(Table(_SAMPLE_HEAD, [_sample_row(one) for one in story.samples]))
    page += [_line("gone", f"{one.trajectory}: {one.gone}") for one in story.samples if one.gone]
    if batch.dropped:
        rows = [
            [str(one.task) if one.sample < 0 else f"{one.task}/{one.sample}", one.reason]
            for one in batch.dropped
        ]
        page += ["dropped", Table(("task", "reason"), rows)]
    return page


def record_page(tree: dict[str, Any]) -> list[Part]:
    """One record, field by field."""
    place = f"{tree['topic']}/{tree['partition']}@{tree['offset']}"
    page: list[Part] = [f"{tree['type']} {tree['id']}".rstrip(), _line("lies at", place)]
    page.append(_line("recorded", tree["at"]))
    event = tree["event"]
    page += [_line(name, json.dumps(value, ensure_ascii=False)) for name, value in event.items()]
    if "task" in event:
        sample = f"/{event['sample']}" if "sample" in event else ""
        page.append(_line("story", f"headrace show {event['task']}{sample}"))
    elif "version" in event and "policy" in event:
        page.append(_line("story", f"headrace show version:{event['policy']}/{event['version']}"))
    return page


def _state(story: TaskStory) -> str:
    if story.result is not None:
        return f"ended ({story.result.event.closed_by})"
    return "runs" if story.episodes else "waits for the scheduler"


def _submission(submitted: Fact[TaskSubmitted]) -> Iterable[Part]:
    task = submitted.event
    environment = "none" if task.environment is None else task.environment.use
    roles = ", ".join(f"{role}: {use.policy}" for role, use in task.roles.items())
    yield _line("submitted", f"{iso(submitted.recorded_at)}  {submitted.place}")
    yield _line("by", f"task:{task.source}/{task.task_id}, tenant {task.tenant}")
    yield _line("item", f"{task.item_id}, epoch {task.epoch}, to {task.purpose}")
    yield _line("asks", f"agent {task.agent}, environment {environment}, roles {roles}")
    yield _line(
        "limits",
        f"{task.samples} samples, {task.max_turns} turns, {task.max_tokens} tokens, "
        f"{task.deadline_s} s, {task.attempts} attempts",
    )
    yield _line("payload", task.payload)


def _learning(task: int, one: LearnedIn) -> Iterable[Part]:
    if one.group is not None:
        group = one.group.event
        told = f"{group.verdict} by {group.estimator}" if group.estimator else group.verdict
        if group.mean is not None:
            told += f", mean {group.mean:.3f}, deviation {group.deviation or 0.0:.3f}"
        told += f": {group.reason}" if group.reason else ""
        yield _line("group", f"policy {one.policy}: {told}  {one.group.place}")
        for exclusion in group.excluded:
            yield _line("excluded", f"{task}/{exclusion.sample}: {exclusion.reason}")
    if one.batch is not None:
        use = one.use(task)
        trained = ", ".join(map(str, use["trained"])) or "none"
        name = f"batch:{one.policy}/{one.batch.event.version}"
        yield _line("decided", f"by {name}: samples trained on: {trained}")
        for sample, reason in use["dropped"].items():
            what = str(task) if sample < 0 else f"{task}/{sample}"
            yield _line("dropped", f"{what}: {reason}")
    if one.published is not None:
        version = one.published.event
        told = f"version:{one.policy}/{version.version} {version.status}"
        yield _line("published", f"{told}  {iso(one.published.recorded_at)}")


def _episode(
    story: TaskStory, episode: EpisodeStory, text_of: TextOf, *, whole: bool
) -> Iterable[Part]:
    outcome, name = episode.outcome, f"{story.number}/{episode.sample}"
    if outcome is None:
        yield f"episode {name}: " + ("not started" if episode.started is None else "runs")
    else:
        end = outcome.event
        yield (
            f"episode {name}: {end.ending}, reward {_number(end.reward)}, "
            f"{end.attempts} {'attempt' if end.attempts == 1 else 'attempts'}, {end.seconds:.2f} s"
        )
        if end.failure is not None:
            yield _line("failure", _failure(end.failure))
        for name_, value in end.rewards.items():
            yield _line("reward", f"{name_} {_number(value)}")
    if episode.started is not None:
        started = episode.started
        yield _line("started", f"{iso(started.recorded_at)}  {started.place}")
        if started.event.verdict is not None:
            yield _line("verdict", _failure(started.event.verdict))
    yield from _advantages(story, episode.sample)
    counting = episode.counting
    for attempt in episode.attempts:
        yield from _attempt(attempt, counting, text_of, whole=whole)


def _advantages(story: TaskStory, sample: int) -> Iterable[Part]:
    for one in story.learned:
        samples = one.group.event.samples if one.group is not None else ()
        for scored in samples:
            if scored.sample == sample:
                advantages = ", ".join(map(_number, floats_in(scored.advantages)))
                yield _line(
                    "advantage",
                    f"policy {one.policy}: {advantages} ({scored.tokens} tokens, "
                    f"{_oldest(scored.oldest_version)})",
                )


def _attempt(
    attempt: AttemptStory,
    counting: Fact[TrajectoryRecorded] | None,
    text_of: TextOf,
    *,
    whole: bool,
) -> Iterable[Part]:
    found = attempt.trajectory
    clip = _one_line if whole else _clipped
    counts = found is not None and counting is not None and found.ref == counting.ref
    if attempt.exchanges and (whole or found is None):
        yield _line("attempt", f"{attempt.number}: {len(attempt.exchanges)} exchanges")
        head = ("call", "asked", "answered", "versions", "reward", "end")
        yield Table(head, [_exchange_row(one, clip) for one in attempt.exchanges])
    if found is not None:
        for failure in found.event.failures:
            yield _line("failed", _failure(failure))
        standing = "counts" if counts else "does not count: no outcome names it"
        yield _line("trajectory", f"attempt {attempt.number}, {standing}  {found.place}")
        if found.event.turns:
            yield Table(_TURN_HEAD, _turn_rows(found.event, text_of, clip))


_TURN_HEAD = ("turn", "policy", "context", "sampled", "tokens", "versions", "reward", "finish")
_SAMPLE_HEAD = (
    "sample", "reward", "ending", "turns", "tokens", "versions", "stale", "advantage", "trajectory",
)  # fmt: skip


def _turn_rows(
    trajectory: TrajectoryRecorded, text_of: TextOf, clip: Callable[[str], str]
) -> list[list[str]]:
    rows = []
    for turn in trajectory.turns:
        context = text_of(turn.policy, turn.context, trajectory.tokenizer)
        sampled = turn.text or text_of(turn.policy, turn.tokens, trajectory.tokenizer)
        rows.append(
            [
                turn.call,
                turn.policy,
                f"{len(turn.context) // 4} tokens" if context is None else clip(context),
                f"{len(turn.tokens) // 4} tokens" if sampled is None else clip(sampled),
                str(len(turn.tokens) // 4),
                "demonstrated" if turn.demonstrated else _numbers(versions_in(turn.versions)),
                _number(turn.reward),
                turn.finish,
            ]
        )
    return rows


def _oldest(version: int) -> str:
    return f"oldest version {version}" if version >= 0 else "demonstrated"


def _exchange_row(exchange: Exchange, clip: Callable[[str], str]) -> list[str]:
    asked, answered, versions, reward, end = "?", "-", "-", "-", ""
    if exchange.request is not None:
        request = exchange.request.event
        if isinstance(request, GenerationRequested):
            context = len(ids_in(request.tokens))
            asked = f"{request.policy} after {context} tokens: {clip(request.text or request.chat)}"
            versions = "demonstrated" if request.demonstration is not None else "-"
        elif isinstance(request, ActionRequested):
            judge = f" by {request.environment.use}" if request.kind == "score" else ""
            asked = f"{request.kind}{judge} {clip(request.payload)}"
    if exchange.answer is not None:
        answer = exchange.answer.event
        answered = clip(answer.text)
        if isinstance(answer, GenerationCompleted):
            end = answer.finish
            if answer.versions:
                versions = _numbers(versions_in(answer.versions))
        elif isinstance(answer, ObservationRecorded):
            reward = _number(answer.reward)
            end = "terminated" if answer.terminated else "truncated" if answer.truncated else ""
        if answer.failure is not None:
            end = _failure(answer.failure)
    return [exchange.call, asked, answered, versions, reward, end]


def _sample_row(one: TrainedSample) -> list[str]:
    return [
        f"{one.task}/{one.sample}" + (f" (use {one.use})" if one.use else ""),
        "gone" if one.gone else _number(one.reward),
        one.ending,
        str(one.turns),
        str(one.tokens),
        _numbers(one.versions),
        str(one.staleness),
        ", ".join(map(_number, one.advantages)),
        one.trajectory,
    ]


def _publication(published: Fact[PolicyPublished], weights: dict[str, bool]) -> Iterable[Part]:
    event = published.event
    yield _line("published", f"{event.status}  {iso(published.recorded_at)}  {published.place}")
    yield _line("by", published.writer or "?")
    yield _line("digest", event.digest.hex())
    if event.full is not None:
        of = "" if event.full_version == event.version else f" of version {event.full_version}"
        yield _line("weights", _blob(event.full, weights) + of)
    for delta in event.deltas:
        to = f"version {delta.from_version} to {delta.to_version}"
        yield _line("and delta", f"{_blob(delta.blob, weights)}, {to}")
    if (adapter := event.adapter) is not None:
        yield _line("adapter", f"rank {adapter.rank}, alpha {adapter.alpha:g}")
        yield _line("base", _blob(adapter.base, weights))
    yield _line(
        "training",
        f"{event.updates} updates in {event.step_s:.2f} s, after waiting {event.wait_s:.2f} s",
    )
    if event.metrics:
        told = "  ".join(f"{name} {value:.5g}" for name, value in sorted(event.metrics.items()))
        yield _line("metrics", told)


def _blob(blob: Blob, there: dict[str, bool]) -> str:
    name = blob.sha256.hex()
    where = "in the blob store" if there.get(name) else "not in the blob store"
    return f"{name}, {blob.size:,} bytes, {where}"


def _failure(failure: Failure) -> str:
    again = ", may be tried again" if failure.retryable else ""
    told = f": {_one_line(failure.message)}" if failure.message else ""
    return f"{failure.origin}: {failure.code}{told}{again}"


def _line(label: str, text: str) -> str:
    return f"  {label:<11} {text}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _numbers(values: Sequence[int]) -> str:
    """Versions: one, or from to."""
    if not values:
        return "-"
    return str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}"


def _one_line(text: str) -> str:
    return text.replace("\r", "").replace("\n", "⏎")


def _clipped(text: str) -> str:
    line = _one_line(text)
    return line if len(line) <= CLIP else f"{line[: CLIP - 1]}…"
