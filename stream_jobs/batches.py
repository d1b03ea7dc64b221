"""Decides which groups make batch n, and when. No I/O, no clock.

Batch n trains version n, so the staleness of its samples is known exactly: how many versions before
n changed the weights since the sample's oldest token. A group is trained whole or dropped whole,
because its advantages belong together. Demonstrated samples are never stale.

Batch n may be assembled when n - 1 is at most `prefetch` ahead of the newest published version. It
takes the groups that go stale first, and it is due when it is full: it has enough groups, or enough
tokens if `tokens` is set. It waits, however, for a live
group (started, not closed) that could not be trained any more afterwards: until that group is late
(`live_groups.py`), or for at most `straggler_wait_s` if that is set. Otherwise long episodes would
be trained on less often than short ones. A batch is short only if nothing more can come: no group
is live, and none was started or closed for `batch_wait_s`. An evaluation task is decided by the
next batch, but makes no batch due.
docs/algorithms.md has the reasons and the simulation.

Every batch states which tasks it and all batches before it decided. So it is result and checkpoint
in one record: after a crash, `on_batch` with the last batch and `on_group` with all groups from its
`groups_read` rebuild this state. A group that was decided already is ignored. If groups are
replayed (`schemas/replay_pool.py`), the last `max_age` batches are needed. Replayed groups are
decided already, so they count for no wait and do not change the frontier. If there are too few of
them, a full batch needs more fresh ones.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import fmean

from headrace.schemas.events import (
    BatchAssembled,
    BatchSample,
    EpisodeStarted,
    GroupClosed,
    PolicyPublished,
    Run,
)
from headrace.schemas.frontier import Frontier
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.replay_pool import ReplayPool, TrainedGroup
from headrace.schemas.staleness import Staleness
from headrace.schemas.version_barrier import others_of
from headrace.stream_jobs.barrier import ENOUGH_BATCHES, PASSED_OVER, Barrier
from headrace.stream_jobs.groups import EVALUATE
from headrace.stream_jobs.live_groups import LiveGroup, LiveGroups, longest_teacher_s
from headrace.stream_jobs.waiting_groups import WaitingGroup, WaitingGroups, fitting, size_of


class BatchAssembler:
    """Groups and published versions of one policy in; batch n out, with its frontier."""

    def __init__(
        self,
        recipe: Recipe,
        policy: str,
        recorded: Mapping[int, int] | None = None,
        skipped: Collection[int] = (),
        barrier: Barrier | None = None,
    ) -> None:
        """`recorded` and `skipped` are for a replay: for each task, the newest batch's version when
        the recorded run decided the task, and the versions that the recorded run skipped. With
        them, samples are as stale as they were then. A replay has no `barrier`: it does not wait
        for other policies."""
        self._policy = policy
        self._digest = recipe.digest
        self._settings = recipe.policies[policy].batches
        self._teacher_s = longest_teacher_s(recipe)
        self._barrier = barrier
        self._passes_over = bool(others_of(recipe, policy))
        self._version = 0
        self._published: int | None = None
        self._frontier = Frontier()
        self._staleness = Staleness(self._settings.prefetch, skipped)
        self._waiting = WaitingGroups(self._settings, self._staleness, recorded or {})
        self._pool = ReplayPool(self._settings, self._staleness)
        self._live = LiveGroups()
        self._changed_s = 0.0
        """When a group was started or closed last, or this job caught up, in epoch seconds."""
        self._next_offset = 0

    @property
    def version(self) -> int:
        """The newest batch's version; 0 before the first."""
        return self._version

    @property
    def waiting_groups(self) -> int:
        """How many closed groups no batch has decided."""
        return len(self._waiting)

    @property
    def live_groups(self) -> int:
        """How many groups were started and are not closed."""
        return len(self._live)

    @property
    def groups_read(self) -> int:
        """Offset of the oldest open group, or of the next group to read. Recovery reads from it."""
        return self._waiting.groups_read(self._next_offset, self._frontier)

    @property
    def batches_needed(self) -> int:
        """How many of the last batches `on_batch` must get on recovery."""
        return self._settings.batches_needed

    def due_at(self, now_s: float) -> float | None:
        """Returns when `next_batch` may give another answer although no event came.

        In epoch seconds, and later than `now_s`. None if only an event can change the answer.
        """
        if not self._waiting.trainable() or not self._may_assemble():
            return None
        moments = [self._changed_s + self._settings.batch_wait_s]
        version, changed_s = self._version + 1, self._changed_s
        if self._barrier is not None and self._barrier.holds(version, now_s, changed_s):
            moments += self._barrier.moments()
        else:
            moments += (self._patient_until(), *self._live.moments())
        return min((moment for moment in moments if moment > now_s), default=None)

    def on_caught_up(self, now_s: float) -> None:
        """Notes that a job has read all that there was, at `now_s` in epoch seconds.

        After a pause the other services start, too, so the wait for more groups begins again.
        """
        self._changed_s = max(self._changed_s, now_s)

    def on_start(self, started: EpisodeStarted, started_s: float) -> None:
        """Notes that a group is live, unless it is closed already.

        `started_s` is when the log recorded the event, in epoch seconds. Only the first event of a
        task counts. Ignores tasks that are not trained on.
        """
        task = started.task
        trains = started.verdict is None and started.submitted.purpose == "train"
        if not trains or task in self._live or task in self._waiting or task in self._frontier:
            return
        version = started.versions.get(self._policy, self._published or 0)
        ends_s = started.deadline / 1000 + self._teacher_s
        self._live.start(task, version, started_s, ends_s)
        self._changed_s = max(self._changed_s, started_s)

    def on_group(self, group: GroupClosed, offset: int) -> None:
        """Adds a group, unless its task is decided or has a waiting group already."""
        self._next_offset = max(self._next_offset, offset + 1)
        self._live.close(group.task, group.seconds if group.mean is not None else 0.0)
        if group.reason != EVALUATE:
            self._changed_s = max(self._changed_s, group.ended / 1000)
        if group.task not in self._frontier and group.task not in self._waiting:
            self._waiting.add(group, offset, self._version)

    def on_policy(self, published: PolicyPublished) -> None:
        """Notes a published version. Ignores other policies."""
        if published.policy == self._policy:
            self._published = max(self._published or 0, published.version)
            if published.status == "skipped":
                self._staleness.skip(published.version)
                self._waiting.judge_again(self._version, self._frontier)

    def on_batch(self, batch: BatchAssembled) -> None:
        """Notes what a batch decided: one that was just written, or on recovery the last ones.

        Recovery passes the last `batches_needed` of them in their order. Ignores a batch that is
        not newer than the newest one.
        """
        if batch.policy != self._policy or batch.version <= self._version:
            return
        self._version = batch.version
        self._pool.on_batch(batch.version, batch.samples)
        self._frontier = batch.frontier()
        self._next_offset = max(self._next_offset, batch.groups_read)
        self._live.forget(self._frontier)
        self._waiting.judge_again(self._version, self._frontier)

    def next_batch(
        self, now_s: float, *, passes_over: bool = True, drawn_below: float = math.inf
    ) -> BatchAssembled | None:
        """Returns the batch that is due now, or None. The state changes only with `on_batch`.

        `now_s` is in epoch seconds. The same inputs give the same batch, byte for byte. Without a
        barrier, `passes_over` says whether the batch draws some of the groups that piled up and
        drops the others, as one that a barrier held does. It draws from those with an offset less
        than `drawn_below`.
        """
        if not self._waiting.trainable() or not self._may_assemble():
            return None
        version, changed_s = self._version + 1, self._changed_s
        if self._barrier is not None and self._barrier.holds(version, now_s, changed_s):
            return None
        chosen, unfit = self._waiting.fresh(), self._waiting.unfit()
        fresh = self._pool.full_at([group.tokens for group in chosen])
        live = self._live.running(now_s)
        if fresh is None:
            if live or now_s < self._changed_s + self._settings.batch_wait_s:
                return None
        else:
            chosen = chosen[:fresh]
            held = passes_over if self._barrier is None else self._barrier.held == version
            if held and self._passes_over:
                chosen, unfit = self._draw(version, drawn_below) or (chosen, unfit)
            if now_s < self._patient_until() and self._strands(self._awaited(now_s), chosen):
                return None
        chosen = list(fitting(chosen))
        taken = sum(waiting.size for waiting in chosen)
        unfit = list(fitting(unfit, taken))
        # After the groups that must be decided: a replay may wait for ever.
        taken += sum(waiting.size for waiting in unfit)
        again = self._pool.chosen(len(chosen))
        replayed = fitting(again, taken, lambda group: size_of(group.samples))
        return self._assemble(chosen, unfit, list(replayed))

    def _draw(
        self, version: int, below: float
    ) -> tuple[list[WaitingGroup], list[WaitingGroup]] | None:
        """Draws some of the groups that piled up: returns what to train on, and what to drop.

        None if they have not piled up. The batch decides all groups up to some offset, so the log
        says from which ones it drew. If too many wait for one batch, it takes half of them, and so
        on until they fit.
        """
        waiting = sorted(
            (one for one in self._waiting if one.offset < below), key=lambda one: one.offset
        )
        while True:
            drawn = self._waiting.in_order(one for one in waiting if one.fresh)
            fresh = self._pool.full_at([group.tokens for group in drawn])
            if not fresh or ENOUGH_BATCHES * fresh >= len(drawn) or drawn[0].shown:
                return None
            drawn.sort(key=lambda one: _chance(one.group.task, version))
            fresh = self._pool.full_at([group.tokens for group in drawn])
            passed_over = [one.without_samples(PASSED_OVER) for one in drawn[fresh:]]
            unfit = [*(one for one in waiting if not one.fresh), *passed_over]
            everything = [*drawn[:fresh], *unfit]
            if len(list(fitting(everything))) == len(everything):
                return drawn[:fresh], unfit
            del waiting[len(waiting) // 2 :]

    def _patient_until(self) -> float:
        """Until when a full batch waits for live groups, in epoch seconds."""
        ended = sorted((one.group.ended, one.tokens) for one in self._waiting if one.fresh)
        full = self._pool.full_at([tokens for _, tokens in ended])
        if full is None:
            return 0.0
        longest_s = self._settings.straggler_wait_s
        return math.inf if longest_s is None else ended[full - 1][0] / 1000 + longest_s

    def _awaited(self, now_s: float) -> list[LiveGroup]:
        """The live groups that a full batch may wait for."""
        bounded = self._settings.straggler_wait_s is not None
        return self._live.running(now_s) if bounded else self._live.punctual(now_s)

    def _strands(self, live: Iterable[LiveGroup], chosen: Sequence[WaitingGroup]) -> bool:
        """Whether a live group goes stale because the next batch does not wait for it.

        Of the live groups, those that can be trained in at most k batches after the next one have
        room in k batches. If they are more, and the next batch holds groups that could wait longer,
        then it takes the live groups' room.
        """
        running = Counter(self._waiting.slack(group.version, self._version) for group in live)
        taken = Counter(waiting.slack for waiting in chosen)
        live_groups = urgent = 0
        for slack in sorted(slack for slack in {*running, *taken} if slack >= 0):
            live_groups += running[slack]
            urgent += taken[slack]
            if live_groups > self._room_after(slack, len(chosen)) and urgent < len(chosen):
                return True
        return False

    def _room_after(self, batches: int, groups: int) -> int:
        """How many fresh groups so many batches have after the next one, which has `groups`."""
        if self._settings.tokens is not None:
            return batches * groups
        return self._pool.fresh_groups(batches + 1) - self._pool.fresh_groups(1)

    def _may_assemble(self) -> bool:
        return (
            self._published is not None
            and self._version - self._published <= self._settings.prefetch
        )

    def _assemble(
        self,
        chosen: Sequence[WaitingGroup],
        unfit: Sequence[WaitingGroup],
        replayed: Sequence[TrainedGroup],
    ) -> BatchAssembled:
        version = self._version + 1
        deciding = [*chosen, *unfit]
        frontier = Frontier(self._frontier.low_mark, self._frontier.runs)
        for waiting in deciding:
            frontier.add(waiting.group.task)
        weight = self._settings.replay.weight if self._settings.replay else 1.0
        again = (sample for group in replayed for sample in group.replayed(weight))
        samples = (*_batch_samples(chosen), *again)
        means = [
            waiting.group.mean
            for waiting in deciding
            # The mean of a group that another program wrote may be any float.
            if waiting.group.mean is not None and math.isfinite(waiting.group.mean)
        ]
        return BatchAssembled(
            policy=self._policy,
            version=version,
            recipe=self._digest,
            seed=_seed(self._digest, self._policy, version),
            samples=samples,
            dropped=tuple(dropped for waiting in deciding for dropped in waiting.dropped),
            sampled_tokens=sum(sample.tokens for sample in samples),
            reward_mean=fmean(means) if means else None,
            low_mark=frontier.low_mark,
            decided=tuple(Run(first=first, last=last) for first, last in frontier.runs),
            groups_read=self._waiting.groups_read(self._next_offset, frontier),
        )


def _batch_samples(chosen: Iterable[WaitingGroup]) -> Iterator[BatchSample]:
    for waiting in chosen:
        for sample in waiting.fresh:
            yield BatchSample(
                task=waiting.group.task,
                sample=sample.sample,
                trajectory=sample.trajectory,
                advantages=sample.advantages,
                tokens=sample.tokens,
                longest=sample.longest,
                oldest_version=sample.oldest_version,
            )


def _chance(task: int, version: int) -> bytes:
    """Returns bytes by which groups are drawn. Their age would not be fair: it depends on how long
    their episodes took."""
    return hashlib.sha256(f"{task}/{version}".encode()).digest()


def _seed(digest: bytes, policy: str, version: int) -> int:
    """Returns 63 bits that depend only on the recipe, the policy and the version.

    They are for other trainers; Headrace's own trainer does not use them.
    """
    text = digest + f"/{policy}/{version}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8]) >> 1
