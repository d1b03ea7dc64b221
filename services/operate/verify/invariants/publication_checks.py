"""I4 and I5 for versions: they grow by one, each from its batch, and their weights from them."""

from __future__ import annotations

from headrace.schemas.events import BatchAssembled, PolicyPublished
from headrace.schemas.packed import unpack_f32
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.operate.verify.invariants.log_facts import Facts, Violations


def check(facts: Facts, recipe: Recipe, *, settled: bool) -> Violations:
    """Judges all versions. `settled`: every batch must have been trained."""
    for policy in recipe.policies:
        records = [
            one.event for one in facts.in_order(PolicyPublished) if one.event.policy == policy
        ]
        yield from _versions(facts, policy, records)
        newest = max((event.version for event in records), default=-1)
        assembled = [one.version for one in facts.events(BatchAssembled) if one.policy == policy]
        if settled and newest != (last := max(assembled, default=0)):
            yield f"I8: batch {policy}/{last} is assembled, and version {newest} the newest"


def _versions(facts: Facts, policy: str, records: list[PolicyPublished]) -> Violations:
    newest, before = -1, None
    for event in records:
        name = f"version {policy}/{event.version}"
        if event.version > newest + 1 or event.version < newest:
            yield f"I5: {name} is published after version {newest}"
        elif event.status == "resumed":
            yield from _resumed(event, newest, before, name)
        elif event.version == newest:
            yield f"I5: {name} is published twice, as {event.status}"
        else:
            yield from _new(facts, event, before, name)
        yield from _weights(event, before, name)
        newest, before = max(newest, event.version), event


def _resumed(
    event: PolicyPublished, newest: int, before: PolicyPublished | None, name: str
) -> Violations:
    """Published again on restart: the newest version, where its weights came out otherwise."""
    if event.version != newest:
        yield f"I4: {name} is resumed after version {newest}"
    elif before is not None and _stored(event) == _stored(before):
        yield f"I4: {name} is resumed with the weights that it had"


def _stored(event: PolicyPublished) -> tuple[object, ...]:
    return event.digest, event.full, event.deltas


def _weights(event: PolicyPublished, before: PolicyPublished | None, name: str) -> Violations:
    """Whole weights and an unbroken chain of deltas give the version: a reader needs no more."""
    at = event.full_version
    for delta in event.deltas:
        if delta.from_version < at or delta.to_version <= delta.from_version:
            yield f"I5: {name} has a delta of version {delta.from_version} where {at} is reached"
        at = delta.to_version
    unchanged = before is not None and event.digest == before.digest
    if event.full is None or (at != event.version and not unchanged):
        yield f"I5: {name} is published without its weights"


def _new(
    facts: Facts, event: PolicyPublished, before: PolicyPublished | None, name: str
) -> Violations:
    if (event.version == 0) != (event.status == "initial"):
        yield f"I5: {name} is published as {event.status}"
    if event.version == 0:
        return
    batch = None if event.batch is None else facts.resolve(event.batch)
    if (
        not isinstance(batch, BatchAssembled)
        or (batch.policy, batch.version) != (event.policy, event.version)
        or batch != facts.get(BatchAssembled, batch.event_id)
    ):
        yield f"I4: {name} does not name the batch that trained it"
    elif event.status == "trained" and _teaches(batch) and not event.updates:
        yield f"I4: {name} is published as trained, and no update was made"
    if event.status == "skipped" and before is not None and event.digest != before.digest:
        yield f"I4: {name} was skipped, and its weights changed"


def _teaches(batch: BatchAssembled) -> bool:
    """Whether there is anything to learn: with equal rewards no gradient, and no update."""
    return any(any(unpack_f32(sample.advantages)) for sample in batch.samples)
