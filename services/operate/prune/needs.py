"""What a broker's namespaces no longer need: which weights, checkpoints and whole namespaces.

The blob store is shared and named by content, so that a blob is needed as long as any namespace
needs it. A policy needs its newest versions, those of its checkpoints on this machine and, while
its run has not ended, each one that an episode may still be pinned to: it was the newest within the
last deadline. Only what a publication of this broker names is ever removed: what no event here
names may be another broker's, and goes only where that is asked for. Pure.

Records are never cut: a namespace is kept whole or, once it has ended and is named, goes whole.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headrace.schemas.events import Event, PolicyPublished, RunStateEntered
from headrace.services.models.blobs import StoredBlob
from headrace.services.namespace.run_life import RunLife
from headrace.services.operate.show.facts import Fact

GRACE_S = 3600.0
"""A version that was the newest within an episode's deadline and this is left alone."""
PUT_S = 600.0
"""A blob that was put since then is left alone: its publication may be on its way."""
UNNAMED_S = 86_400.0
"""A blob that no event names may be one that is about to be named: for a day."""
ENDED_S = 30.0
"""Processes of a run that has ended are gone after this."""
DEADLINE_S = 86_400.0
"""Where a recipe does not say how long an episode may take."""
Kind = Literal["blob", "checkpoints", "folder", "topics"]


@dataclass(frozen=True, slots=True)
class Published:
    """What counts of a PolicyPublished here. Blobs by their SHA-256 in hex."""

    policy: str
    version: int
    at: float
    """Epoch seconds."""
    weights: frozenset[str] = frozenset()
    """Whole ones, and the deltas that build on them."""
    tokenizer: str | None = None


@dataclass(slots=True)
class Namespace:
    """What is known of one, read from `runs` and `policies`."""

    name: str
    life: RunLife = field(default_factory=RunLife)
    ended_at: float | None = None
    """Epoch seconds; None while the run has not ended."""
    publications: list[Published] = field(default_factory=list)
    """In log order."""

    def ended(self, now_s: float) -> bool:
        """Whether nothing of it runs any more."""
        return self.ended_at is not None and self.ended_at + ENDED_S <= now_s

    def deadline_s(self) -> float:
        """The longest that an episode of the recipe takes."""
        if self.life.started is None:
            return DEADLINE_S
        tasks = json.loads(self.life.started.recipe).get("tasks", {})
        return float(tasks.get("deadline_s", DEADLINE_S))

    def add(self, fact: Fact[Event]) -> None:
        """Takes the next record of `runs` or `policies`."""
        event = fact.event
        if isinstance(event, RunStateEntered):
            self.life.on_event(event, fact.recorded_at)
            if event.state == "ended" and self.ended_at is None:
                self.ended_at = fact.recorded_at
        elif isinstance(event, PolicyPublished):
            weights = [event.full] if event.full is not None else []
            weights += [delta.blob for delta in event.deltas]
            weights += [event.adapter.base] if event.adapter is not None else []
            self.publications.append(
                Published(
                    event.policy,
                    event.version,
                    fact.recorded_at,
                    frozenset(blob.sha256.hex() for blob in weights),
                    event.tokenizer.sha256.hex() if event.tokenizer is not None else None,
                )
            )

    def weights(self) -> set[str]:
        """Every version's."""
        return {name for one in self.publications for name in one.weights}

    def tokenizers(self) -> set[str]:
        """Every version's."""
        return {one.tokenizer for one in self.publications if one.tokenizer is not None}


@dataclass(frozen=True, slots=True)
class Prunable:
    """One thing that may go."""

    kind: Kind
    what: str
    size: int
    """Bytes; of topics 0: their broker knows."""
    why: str
    blob: StoredBlob | None = None
    put_before: float = 0.0
    path: Path | None = None
    topics: tuple[str, ...] = ()

    def to_tree(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in ("kind", "what", "size", "why")}


def needed_versions(
    publications: Sequence[Published],
    keep: int,
    checkpoints: Collection[int],
    newest_since: float | None,
) -> set[int]:
    """The versions of one policy whose weights are needed. Publications in log order.

    `newest_since`: also each that was the newest at that time or later (epoch s); None: the run
    has ended.
    """
    first_at: dict[int, float] = {}
    for one in publications:
        first_at.setdefault(one.version, one.at)
    versions = sorted(first_at)
    needed = set(versions[-keep:]) | (set(checkpoints) & set(versions))
    if newest_since is not None:
        for version, following in zip(versions, [*versions[1:], None], strict=True):
            if following is None or first_at[following] >= newest_since:
                needed.add(version)
    return needed


def needed_blobs(
    namespace: Namespace, keep: int, checkpoints: Mapping[str, Collection[int]], now_s: float
) -> set[str]:
    """SHA-256 in hex of the weights and tokenizers that a namespace needs.

    `checkpoints` are versions by policy.
    """
    since = None
    if not namespace.ended(now_s):
        since = now_s - namespace.deadline_s() - GRACE_S
    needed: set[str] = set()
    for policy in {one.policy for one in namespace.publications}:
        mine = [one for one in namespace.publications if one.policy == policy]
        versions = needed_versions(mine, keep, checkpoints.get(policy, ()), since)
        needed |= {name for one in mine if one.version in versions for name in one.weights}
    return needed | namespace.tokenizers()


def needless_blobs(
    stored: Iterable[StoredBlob],
    published: Collection[str],
    needed: Collection[str],
    named: Collection[str] | None,
    now_s: float,
) -> Iterator[Prunable]:
    """The blobs that may go: what was published and nobody needs; given `named`, what it lacks."""
    for blob in stored:
        if blob.name in needed:
            continue
        if blob.name in published:
            before = now_s - PUT_S
            why = "of a version that nothing needs any more"
        elif named is not None and blob.name not in named:
            before = now_s - UNNAMED_S
            why = "no event of this broker names it" if blob.name else "left by a writer that died"
        else:
            continue
        if blob.put_at < before:
            yield Prunable("blob", blob.name or blob.path.name, blob.size, why, blob, before)
