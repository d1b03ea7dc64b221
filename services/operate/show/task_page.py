"""The story of a task as a page for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from headrace.schemas.events import (
    Blob,
    Failure,
    GenerationCompleted,
    GenerationRequested,
    TaskSubmitted,
    TrajectoryRecorded,
)
from headrace.services.log.unpacked import floats_in, ids_in, versions_in
from headrace.services.operate.readable import iso
from headrace.services.operate.show.facts import Fact
from headrace.services.operate.show.pages import (
    Part,
    Table,
    dropped_name,
    line,
    number,
    one_line,
    versions_range,
)
from headrace.services.operate.show.task_story import (
    AttemptStory,
    EpisodeStory,
    Exchange,
    TaskStory,
    TaskTraining,
)

CLIP = 60
"""Most characters of a text in a task's table. The page of an episode shows all of it."""
_TURN_HEAD = ("turn", "policy", "context", "sampled", "tokens", "versions", "reward", "finish")
_EXCHANGE_HEAD = ("call", "request", "answer", "versions", "reward", "end")

TextOf = Callable[[str, bytes, str], str | None]
"""Decodes token ids, given their policy and the digest of their tokenizer.

Returns None if this machine does not have the tokenizer.
"""


def task_page(story: TaskStory, text_of: TextOf, *, whole: bool) -> list[Part]:
    """Shows a task and its episodes. With `whole`, it shows whole texts and every exchange."""
    page: list[Part] = [f"task {story.task}: {_state(story)}"]
    if story.submitted is not None:
        page += _submission(story.submitted)
    if story.result is not None:
        page.append(line("ended", f"{iso(story.result.recorded_at)}  {story.result.location}"))
    for one in story.policies:
        page += _training(story.task, one)
    if story.duplicates:
        page.append(line("duplicates", f"{story.duplicates} repeated records, which don't count"))
    page += [line("remark", remark) for remark in story.remarks]
    for episode in story.episodes:
        page += _episode(story, episode, text_of, whole=whole)
    return page


def tasks_page(
    title: str, tasks: Sequence[Fact[TaskSubmitted]], remarks: Sequence[str]
) -> list[Part]:
    """Shows tasks as a table, one in each row."""
    rows = []
    for fact in tasks:
        task = fact.event
        labels = ", ".join(f"{name}={label}" for name, label in task.labels.items())
        name = f"task:{task.source}/{task.task_id}"
        rows.append([str(fact.ref.offset), name, task.tenant, one_line(labels)])
    table = Table(("task", "by", "tenant", "labels"), rows)
    return [title, table, *(line("remark", remark) for remark in remarks)]


def _state(story: TaskStory) -> str:
    if story.result is None:
        return "running" if story.episodes else "waiting for the scheduler"
    closed_by = story.result.event.closed_by
    return "ended" if closed_by == "all" else f"ended, {closed_by}"


def _submission(submitted: Fact[TaskSubmitted]) -> Iterable[Part]:
    task = submitted.event
    used = task.environment
    environment = "none" if used is None else f"{used.use} ({used.mode})"
    roles = ", ".join(f"{role} by policy {use.policy}" for role, use in task.roles.items())
    yield line("submitted", f"{iso(submitted.recorded_at)}  {submitted.location}")
    yield line("by", f"task:{task.source}/{task.task_id}, tenant {task.tenant}")
    yield line("item", f"{task.item_id}, epoch {task.epoch}, purpose {task.purpose}")
    yield line("uses", f"agent {task.agent}, environment {environment}, roles: {roles or 'none'}")
    if used is not None and used.image:
        yield line("image", used.image)
    if used is not None and used.collect:
        yield line("collects", ", ".join(used.collect))
    yield line(
        "limits",
        f"{task.samples} samples, {task.max_turns} turns, {task.max_tokens} tokens, "
        f"{task.deadline_s} s, {task.attempts} attempts, priority {task.priority}",
    )
    for name, label in task.labels.items():
        yield line("label", one_line(f"{name}={label}"))
    yield from _files(task.artifacts)
    yield line("payload", task.payload)


def _files(artifacts: Iterable[Blob]) -> Iterable[Part]:
    for one in artifacts:
        yield line("file", f"{one.name}  {one.size} bytes  {one.sha256.hex()}")


def _training(task: int, one: TaskTraining) -> Iterable[Part]:
    if one.group is not None:
        group = one.group.event
        text = f"{group.verdict} by {group.estimator}" if group.estimator else group.verdict
        if group.mean is not None:
            text += f", mean {group.mean:.3f}, deviation {group.deviation or 0.0:.3f}"
        text += f": {group.reason}" if group.reason else ""
        yield line("group", f"policy {one.policy}: {text}  {one.group.location}")
        for exclusion in group.excluded:
            yield line("excluded", f"{task}/{exclusion.sample}: {exclusion.reason}")
    if one.batch is not None:
        samples = ", ".join(map(str, one.batch.trained)) or "none"
        yield line("batch", f"batch:{one.policy}/{one.batch.version} trains on samples: {samples}")
        for sample, reason in one.batch.dropped.items():
            yield line("dropped", f"{dropped_name(task, sample)}: {reason}")
    if one.published is not None:
        version = one.published.event
        name = f"version:{one.policy}/{version.version}"
        yield line("published", f"{name} {version.status}  {iso(one.published.recorded_at)}")


def _episode(
    story: TaskStory, episode: EpisodeStory, text_of: TextOf, *, whole: bool
) -> Iterable[Part]:
    outcome, name = episode.outcome, f"{story.task}/{episode.sample}"
    if outcome is None:
        yield f"episode {name}: " + ("not started" if episode.started is None else "running")
    else:
        end = outcome.event
        yield (
            f"episode {name}: {end.ending}, reward {number(end.reward)}, "
            f"{end.attempts} {'attempt' if end.attempts == 1 else 'attempts'}, {end.seconds:.2f} s"
        )
        if end.failure is not None:
            yield line("failure", _failure(end.failure))
        for part, value in end.rewards.items():
            yield line("reward", f"{part} {number(value)}")
        yield from _files(end.artifacts)
    if episode.started is not None:
        started = episode.started
        yield line("started", f"{iso(started.recorded_at)}  {started.location}")
        if started.event.verdict is not None:
            yield line("verdict", _failure(started.event.verdict))
    yield from _advantages(story, episode.sample)
    counting = episode.counting
    for attempt in episode.attempts:
        yield from _attempt(attempt, counting, text_of, whole=whole)


def _advantages(story: TaskStory, sample: int) -> Iterable[Part]:
    for one in story.policies:
        for scored in one.group.event.samples if one.group is not None else ():
            if scored.sample == sample:
                oldest = scored.oldest_version
                age = f"oldest version {oldest}" if oldest >= 0 else "demonstrated"
                yield line(
                    "advantage",
                    f"policy {one.policy}: {', '.join(map(number, floats_in(scored.advantages)))} "
                    f"(reward {number(scored.reward)}, {scored.tokens} tokens, {age})",
                )


def _attempt(
    attempt: AttemptStory,
    counting: Fact[TrajectoryRecorded] | None,
    text_of: TextOf,
    *,
    whole: bool,
) -> Iterable[Part]:
    found = attempt.trajectory
    clip = one_line if whole else _clipped
    if attempt.exchanges and (whole or found is None):
        yield line("attempt", f"{attempt.attempt}: {len(attempt.exchanges)} exchanges")
        yield Table(_EXCHANGE_HEAD, [_exchange_row(one, clip) for one in attempt.exchanges])
    if found is not None:
        for failure in found.event.failures:
            yield line("failure", _failure(failure))
        counts = counting is not None and found.ref == counting.ref
        status = "counts" if counts else "does not count, since no outcome names it"
        yield line("trajectory", f"attempt {attempt.attempt}, {status}  {found.location}")
        if found.event.turns:
            yield Table(_TURN_HEAD, _turn_rows(found.event, text_of, clip))


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
                "demonstrated" if turn.demonstrated else versions_range(versions_in(turn.versions)),
                number(turn.reward),
                turn.finish,
            ]
        )
    return rows


def _exchange_row(exchange: Exchange, clip: Callable[[str], str]) -> list[str]:
    asked, answered, versions, reward, end = "?", "-", "-", "-", ""
    if exchange.request is not None:
        request = exchange.request.event
        if isinstance(request, GenerationRequested):
            text = clip(request.text or request.chat)
            context = len(ids_in(request.tokens))
            asked = f"generate by {request.policy} after {context} tokens: {text}"
            if request.kind == "score":
                count = sum(one.count for one in request.scored)
                asked = f"score by {request.policy} of {count} of {context} tokens"
            versions = "demonstrated" if request.demonstration is not None else "-"
        else:
            judge = f" by {request.environment.use}" if request.kind == "score" else ""
            asked = f"{request.kind}{judge} {clip(request.payload)}"
    if exchange.answer is not None:
        answer = exchange.answer.event
        answered = clip(answer.text)
        if isinstance(answer, GenerationCompleted):
            end = answer.finish
            if answer.versions:
                versions = versions_range(versions_in(answer.versions))
        else:
            reward = number(answer.reward)
            end = "terminated" if answer.terminated else "truncated" if answer.truncated else ""
        if answer.failure is not None:
            end = _failure(answer.failure)
    return [exchange.call, asked, answered, versions, reward, end]


def _failure(failure: Failure) -> str:
    message = f": {one_line(failure.message)}" if failure.message else ""
    again = " (retryable)" if failure.retryable else ""
    return f"{failure.origin}: {failure.code}{message}{again}"


def _clipped(text: str) -> str:
    short = one_line(text)
    return short if len(short) <= CLIP else f"{short[: CLIP - 1]}…"
