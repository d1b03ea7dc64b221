"""The rules of the contract for trainers, judged on what the kit saw. Pure.

Each judge returns what happened if the rule does not hold, and "" if it does. It raises NotChecked
if the runs can't show it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.services.operate.conformance.conformance_report import NotChecked, expected_by
from headrace.services.operate.conformance.trainer.observed_run import ObservedRun, Publication

SIGTERM_S = 10.0
NOISE = 4.0
"""How much further than two uninterrupted runs from each other an interrupted one may be."""


@dataclass(frozen=True, slots=True)
class TrainerEvidence:
    """The runs that are judged."""

    straight: ObservedRun
    """Nobody disturbed it."""
    killed: ObservedRun | None
    """Its trainer was killed and started again several times. It had the same batches. None if the
    other run could not go on."""
    poison: int
    """The version whose batch can't be trained on."""
    last: int
    """The newest version that has a batch."""
    spread: float = 0.0
    """Relative distance between the weights of two runs that nobody disturbed."""
    distance: float = 0.0
    """Relative distance between the weights of the killed run and one that nobody disturbed."""

    @property
    def runs(self) -> tuple[ObservedRun, ...]:
        """The runs that took place."""
        return (self.straight,) if self.killed is None else (self.straight, self.killed)


Judge = Callable[[TrainerEvidence], str]


@dataclass(frozen=True, slots=True)
class TrainerRule:
    """One rule of the contract."""

    name: str
    expected: str
    advice: str
    judge: Judge


RULES: list[TrainerRule] = []
"""All rules, in the order in which they are reported."""


def _rule(advice: str) -> Callable[[Judge], Judge]:
    """Adds a judge to RULES: its name is that of the rule, its docstring what must happen."""

    def add(judge: Judge) -> Judge:
        RULES.append(TrainerRule(judge.__name__, expected_by(judge), advice, judge))
        return judge

    return add


@_rule("Publish version 0 before you read batches.")
def publishes_version_0(evidence: TrainerEvidence) -> str:
    """The first record is version 0 with status `initial` and no batch."""
    for run in evidence.runs:
        if not run.publications:
            return "no version was published"
        first = run.publications[0].event
        if (first.version, first.status, first.batch) != (0, "initial", None):
            return f"the first record is version {first.version} with status {first.status!r}"
    return ""


@_rule("Publish each batch's version before you take the next batch, and skip no batch silently.")
def versions_in_order(evidence: TrainerEvidence) -> str:
    """Batch n makes version n, and versions ascend without a gap."""
    for run in evidence.runs:
        newest = -1
        for one in run.publications:
            if one.version > newest + 1:
                return f"version {one.version} follows version {newest}"
            if one.version < newest:
                return f"version {one.version} was published after version {newest}"
            newest = one.version
        if newest > evidence.last:
            return f"version {newest} has no batch: the last one is {evidence.last}"
    return ""


@_rule("After a start, make the published versions once more without publishing them.")
def each_version_once(evidence: TrainerEvidence) -> str:
    """A version is published again only as `resumed`, because its weights or blobs changed."""
    for run in evidence.runs:
        before: dict[int, Publication] = {}
        for one in run.publications:
            known = before.get(one.version)
            if known is None and one.event.status == "resumed":
                return f"version {one.version} is `resumed`, but was not published before"
            if known is not None and one.event.status != "resumed":
                return f"version {one.version} was published twice as {one.event.status!r}"
            if known is not None and _stored(known) == _stored(one):
                return f"version {one.version} was published again with what it had"
            before[one.version] = one
    return ""


def _stored(one: Publication) -> tuple[object, ...]:
    return one.event.digest, one.event.full, one.event.deltas


@_rule("Store the weights first, and compute the digest from the bytes that you stored.")
def digests_are_right(evidence: TrainerEvidence) -> str:
    """The digest of each record is that of the weights that it names."""
    for one in (one for run in evidence.runs for one in run.publications):
        if one.digest is None:
            return f"the weights of version {one.version} can't be read: {one.problem}"
        if one.digest != one.event.digest:
            return (
                f"version {one.version} has the digest {one.event.digest.hex()[:16]}…, but its "
                f"weights have {one.digest.hex()[:16]}…"
            )
    return ""


@_rule("Put the topic, partition, offset and digest of the batch's record into `batch`.")
def names_its_batch(evidence: TrainerEvidence) -> str:
    """A version that is trained or skipped refers to the location of its batch."""
    for run in evidence.runs:
        for one in run.publications:
            named, batch = one.event.batch, run.batches.get(one.version)
            if one.event.status in ("trained", "skipped") and named != batch:
                return f"version {one.version} does not refer to batch {one.version}"
    return ""


@_rule("Check that the optimizer steps, and that you publish the weights after the step.")
def each_batch_trains(evidence: TrainerEvidence) -> str:
    """Every batch that can be trained on changes the weights."""
    versions = evidence.straight.effective()
    for number in range(1, evidence.last + 1):
        before, after = versions.get(number - 1), versions.get(number)
        if number == evidence.poison or before is None or after is None:
            continue
        if after.event.status == "skipped":
            return f"version {number} was skipped, but its batch can be trained on"
        if before.event.digest == after.event.digest:
            return f"version {number} has the weights of version {number - 1}"
    return ""


@_rule("Check that loss and gradient norm are finite before the optimizer steps.")
def skips_a_poison_batch(evidence: TrainerEvidence) -> str:
    """A batch with infinite advantages is published as `skipped`, with the weights before it."""
    tried = [run for run in evidence.runs if evidence.poison in run.batches]
    if not tried:
        raise NotChecked("no run came so far")
    for run in tried:
        versions = run.effective()
        first = next((o for o in run.publications if o.version == evidence.poison), None)
        before = versions.get(evidence.poison - 1)
        if before is None:
            raise NotChecked(f"version {evidence.poison - 1} before it is missing")
        if first is None:
            return f"version {evidence.poison}, whose advantages are infinite, was not published"
        if first.event.status != "skipped":
            return f"version {evidence.poison} is {first.event.status!r}, its batch is poison"
        if first.event.digest != before.event.digest:
            return f"version {evidence.poison} was skipped, and its weights changed"
    return ""


@_rule("Read the trainer's output. If it is only slow, raise --limit.")
def makes_every_version(evidence: TrainerEvidence) -> str:
    """Each version comes in time, also after kill -9 and a start."""
    return "; ".join(failure for run in evidence.runs for failure in run.failures)


@_rule(
    "Save model, optimizer, schedule and random state together with the checkpoint, and load all "
    "of them."
)
def keeps_its_state(evidence: TrainerEvidence) -> str:
    """A run with kills ends with the weights of a run without kills."""
    if evidence.killed is None or evidence.killed.failures:
        raise NotChecked("no run with kills came to its end")
    if evidence.distance <= NOISE * evidence.spread:
        return ""
    straight, killed = evidence.straight.effective(), evidence.killed.effective()
    first = next(
        (n for n, one in sorted(straight.items()) if n in killed and _differ(one, killed[n])), None
    )
    return (
        f"the weights differ from version {first} on. In the end their relative distance is "
        f"{evidence.distance:.3g}; that of two runs without kills is {evidence.spread:.3g}"
    )


def _differ(one: Publication, other: Publication) -> bool:
    return one.event.digest != other.event.digest


@_rule(
    "Publish in transactions with the transactional id of the policy's trainer, and end when the "
    "broker fences you."
)
def is_fenced(evidence: TrainerEvidence) -> str:
    """A trainer that another one has replaced publishes nothing more."""
    if evidence.killed is None or evidence.killed.fenced is None:
        raise NotChecked("no run with kills came so far")
    return evidence.killed.fenced


@_rule("Leave SIGTERM alone, or stop in its handler: what was not published is made again.")
def ends_on_sigterm(evidence: TrainerEvidence) -> str:
    """SIGTERM ends the process within 10 s."""
    for run in evidence.runs:
        if run.stopped_after_s is None:
            return f"it was still running {SIGTERM_S:g} s after SIGTERM"
    return ""


@_rule("End your own child processes, or start them so that they end with their parent.")
def leaves_no_process(evidence: TrainerEvidence) -> str:
    """After SIGTERM no process of the trainer is left."""
    left = [command for run in evidence.runs for command in run.left_behind]
    return f"{len(left)} processes were left: {left[0]}" if left else ""
