"""The wait graph of a run: who waits for whom, since when, the likely cause and what helps. Pure.

The trainer waits for a batch, the batch for groups, a group for its episodes, an episode for an
action, a prompt or its agent worker, and those for a worker. A task that has not started waits for
a limit, for room, for its tenant or for reports of workers. A wait that waits for nothing else is a
root: it has the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from headrace.services.operate.waits.call_waits import CallWaits
from headrace.services.operate.waits.found_wait import Wait as Wait
from headrace.services.operate.waits.heard_workers import CONTINUE, PAUSED
from headrace.services.operate.waits.policy_waits import batch_wait, trainer_wait
from headrace.services.operate.waits.run_facts import EpisodeId, LiveEpisode, RunFacts
from headrace.services.operate.waits.service_waits import ServiceWaits
from headrace.services.operate.waits.task_waits import task_waits

SHOWN_GROUPS = 5
"""Groups that are named: those whose episodes have waited longest."""
SHOWN_EPISODES = 4
"""Episodes of each of them that are named."""
SILENT_S = 8.0
"""A broker that has not answered for longer is waited for."""
WEAK = ("episode", "prompt", "action", "group")
"""Roots of these kinds may just be busy. What they share is the more likely cause."""
ENOUGH_S = 0.5
"""Waits that are shorter are left out: while a run goes on, each part of it waits now and then."""


@dataclass(frozen=True, slots=True)
class _Live:
    """The groups with the episodes that have waited longest, and how many others there are."""

    groups: dict[int, list[tuple[EpisodeId, LiveEpisode]]]
    others: int


def build_waits(facts: RunFacts, now: float) -> list[Wait]:
    """Returns the waits of a run, the oldest first, and the roots last.

    `now` is in epoch seconds. A run that has ended waits for nothing, and a paused one for people.
    """
    if facts.state == "ended":
        return []
    if (since := facts.paused_at(now)) is not None:
        problems = ServiceWaits(facts, now).found()
        return _sorted([_paused(facts, since), *problems, *broker_waits(facts, now)], now)
    live = _live(facts)
    services = ServiceWaits(facts, now)
    calls = CallWaits(facts, services, now)
    waits = [*_episodes(facts, live, services, calls, now)]
    groups = tuple(f"group/{task}" for task in live.groups)
    tasks = list(task_waits(facts, services, groups, now))
    below = groups or tuple(one.id for one in tasks[:1])
    for name, policy in facts.policies.items():
        waits += trainer_wait(facts, services, name, now)
        if policy.trained and 0 <= policy.version >= policy.batch:
            waits += batch_wait(facts, services, name, below, now)
    waits += [*_groups(live, now), *tasks]
    waits += [*calls.workers(), *services.found()]
    waits += broker_waits(facts, now)
    return _sorted(waits, now)


def _paused(facts: RunFacts, since: float) -> Wait:
    newest = {(one.service, one.policy): one for one in facts.workers.lives.values()}
    failed = [
        f"; the last {one.service} failed: {one.reason}"
        for one in newest.values()
        if one.state == "failed"
    ]
    return Wait("run", "run", "the run", since, (), "".join([PAUSED, *failed]), CONTINUE)


def broker_waits(facts: RunFacts, now: float) -> Iterator[Wait]:
    """Yields a wait for the broker, if it is watched and does not answer."""
    since = facts.answered_at
    if since is not None and now - since > SILENT_S:
        yield Wait(
            "broker",
            "broker",
            "the Kafka broker",
            since,
            (),
            "the broker does not answer, so nothing can go on. It may be paused, overloaded, out "
            "of disk, or cut off from the network",
            "see whether its process runs and what its log says; `headrace up` starts the local "
            "one again if it has ended. Workers go on by themselves once it answers",
        )


def _live(facts: RunFacts) -> _Live:
    """Chooses the groups whose episodes have not moved for longest."""
    by_age = sorted(
        ((key, one) for key, one in facts.episodes.items() if one.started is not None),
        key=lambda pair: (pair[1].newest, pair[0]),
    )
    groups: dict[int, list[tuple[EpisodeId, LiveEpisode]]] = {}
    others = facts.more_episodes
    for key, episode in by_age:
        known = groups.get(key[0])
        if known is None and len(groups) < SHOWN_GROUPS:
            known = groups[key[0]] = []
        if known is not None and len(known) < SHOWN_EPISODES:
            known.append((key, episode))
        else:
            others += 1
    return _Live(groups, others)


def _groups(live: _Live, now: float) -> Iterator[Wait]:
    for number, (task, episodes) in enumerate(live.groups.items()):
        more = f"; {live.others:,} more live episodes are not listed" if number == 0 else ""
        since = min(one.at for _, one in episodes)
        yield Wait(
            f"group/{task}",
            "group",
            f"group of task {task}",
            since,
            tuple(f"episode/{key[0]}/{key[1]}" for key, _ in episodes),
            f"its episodes have not ended{more if live.others else ''}",
            f"headrace show {task}",
        )


def _episodes(
    facts: RunFacts, live: _Live, services: ServiceWaits, calls: CallWaits, now: float
) -> Iterator[Wait]:
    for episodes in live.groups.values():
        for (task, sample), episode in episodes:
            requests = sorted(episode.requests.values(), key=lambda one: one.at)
            on = []
            for request in islice(requests, SHOWN_EPISODES):
                found = calls.wait(request, episode)
                on.append(found.id)
                yield found
            name, since = f"episode {task}/{sample}", episode.newest
            if on:
                cause = "it has asked for something and has no answer"
            else:
                on, cause = services.agent(episode, now)
            yield Wait(
                f"episode/{task}/{sample}", "episode", name, since, tuple(on), cause,
                f"headrace show {task}/{sample}",
            )  # fmt: skip


def _sorted(waits: Iterable[Wait], now: float) -> list[Wait]:
    """Returns each wait once, the oldest first and the roots last, without dangling ids."""
    found = {one.id: one for one in reversed(list(waits))}
    old = {one.id: one for one in found.values() if now - one.since >= ENOUGH_S}
    kept = [replace(one, on=tuple(on for on in one.on if on in old)) for one in old.values()]
    return sorted(kept, key=lambda one: (not one.on, one.since, one.id))


def likely_cause(waits: Sequence[Wait]) -> Wait | None:
    """Returns the root that the oldest waits lead to. None if nothing waits.

    What stops everything, the broker or a pause, comes first. Then it takes the oldest root that
    the trainer that has waited longest leads to, and that is not just an episode or a call, which
    may be busy. If there is only such a root, the oldest other root of the graph is more likely.
    """
    known = {one.id: one for one in waits}
    if not known:
        return None
    if first := [one for one in waits if one.kind in ("broker", "run")]:
        return known.get("broker") or known.get("run", first[0])
    by_age = sorted(waits, key=lambda one: (one.kind != "trainer", one.since, one.id))
    reached, ahead = set[str](), [by_age[0].id]
    while ahead:
        name = ahead.pop()
        if name not in reached:
            reached.add(name)
            ahead += known[name].on
    roots = [one for one in waits if not one.on] or by_age
    return min(roots, key=lambda one: (one.kind in WEAK, one.id not in reached, one.since, one.id))


def wait_lines(waits: Sequence[Wait], now: float) -> list[str]:
    """Returns the graph as text for people: the likely cause, then every wait."""
    if not waits:
        return ["Nothing waits."]
    cause = likely_cause(waits)
    lines = []
    if cause is not None:
        lines += [
            f"Likely cause: {cause.name}, for {spell_s(now - cause.since)}: {cause.cause}",
            f"What helps: {cause.help}",
        ]
    lines.append("Who waits, the oldest first:")
    names = {one.id: one.name for one in waits}
    for one in waits:
        on = ", ".join(names[other] for other in one.on)
        lines.append(
            f"  {one.name}, for {spell_s(now - one.since)}: {one.cause}"
            + (f". It waits for {on}" if on else "")
        )
    return lines


def spell_s(seconds: float) -> str:
    """Returns a duration as text, for example `2 min 13 s`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
