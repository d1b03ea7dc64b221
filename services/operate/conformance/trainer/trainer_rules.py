"""The rules of the contract for trainers, judged on what the kit saw. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.services.operate.conformance.conformance_report import (
    NotChecked,
    Violation,
    require,
    rule,
)
from headrace.services.operate.conformance.trainer.observed_run import ObservedRun, Publication

SIGTERM_S = 10.0
NOISE = 4.0
"""How much further than two uninterrupted runs from each other an interrupted one may be."""


@dataclass(frozen=True, slots=True)
class TrainerRules:
    """The rules in the order in which they are reported, and the runs that they judge."""

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

    @property
    def _published(self) -> list[Publication]:
        """All publications. Without any, every rule about them would hold: raises NotChecked."""
        found = [one for run in self.runs for one in run.publications]
        if not found:
            raise NotChecked("no version was published")
        return found

    @rule("Publish version 0 before you read batches.")
    async def publishes_version_0(self) -> None:
        """The first record is version 0 with status `initial` and no batch."""
        for run in self.runs:
            require(bool(run.publications), "no version was published")
            first = run.publications[0].event
            if (first.version, first.status, first.batch) != (0, "initial", None):
                raise Violation(
                    f"the first record is version {first.version} with status {first.status!r}"
                )

    @rule(
        "Publish each batch's version before you take the next batch, and skip no batch silently."
    )
    async def versions_in_order(self) -> None:
        """Batch n makes version n, and versions ascend without a gap."""
        for run in self.runs if self._published else ():
            newest = -1
            for one in run.publications:
                if one.version > newest + 1:
                    raise Violation(f"version {one.version} follows version {newest}")
                if one.version < newest:
                    raise Violation(f"version {one.version} was published after version {newest}")
                newest = one.version
            if newest > self.last:
                raise Violation(f"version {newest} has no batch: the last one is {self.last}")

    @rule("After a start, make the published versions once more without publishing them.")
    async def each_version_once(self) -> None:
        """A version is published again only as `resumed`, because its weights or blobs changed."""
        for run in self.runs if self._published else ():
            before: dict[int, Publication] = {}
            for one in run.publications:
                known, name = before.get(one.version), f"version {one.version}"
                if known is None and one.event.status == "resumed":
                    raise Violation(f"{name} is `resumed`, but was not published before")
                if known is not None and one.event.status != "resumed":
                    raise Violation(f"{name} was published twice as {one.event.status!r}")
                if known is not None and _stored(known) == _stored(one):
                    raise Violation(f"{name} was published again with what it had")
                before[one.version] = one

    @rule("Store the weights first, and compute the digest from the bytes that you stored.")
    async def digests_are_right(self) -> None:
        """The digest of each record is that of the weights that it names."""
        for one in self._published:
            name = f"version {one.version}"
            if one.digest is None:
                raise Violation(f"the weights of {name} can't be read: {one.problem}")
            if one.digest != one.event.digest:
                said, found = one.event.digest.hex()[:16], one.digest.hex()[:16]
                raise Violation(f"{name} has the digest {said}…, but its weights have {found}…")

    @rule("Put the topic, partition, offset and digest of the batch's record into `batch`.")
    async def names_its_batch(self) -> None:
        """A version that is trained or skipped refers to the location of its batch."""
        made = [
            (one.version, one.event.batch, run.batches.get(one.version))
            for run in self.runs
            for one in run.publications
            if one.event.status in ("trained", "skipped")
        ]
        if not made:
            raise NotChecked("no version was made of a batch")
        for version, named, batch in made:
            if named != batch:
                raise Violation(f"version {version} does not refer to batch {version}")

    @rule("Check that the optimizer steps, and that you publish the weights after the step.")
    async def each_batch_trains(self) -> None:
        """Every batch that can be trained on changes the weights."""
        versions = self.straight.effective()
        numbers = [
            number
            for number in range(1, self.last + 1)
            if number != self.poison and {number - 1, number} <= versions.keys()
        ]
        if not numbers:
            raise NotChecked("no version was made of a batch")
        for number in numbers:
            before, after = versions[number - 1], versions[number]
            if after.event.status == "skipped":
                raise Violation(f"version {number} was skipped, but its batch can be trained on")
            if before.event.digest == after.event.digest:
                raise Violation(f"version {number} has the weights of version {number - 1}")

    @rule("Check that loss and gradient norm are finite before the optimizer steps.")
    async def skips_a_poison_batch(self) -> None:
        """A batch with infinite advantages is `skipped`, and leaves the weights as they were."""
        tried = [run for run in self.runs if self.poison in run.batches]
        if not tried:
            raise NotChecked("no run came so far")
        name = f"version {self.poison}"
        for run in tried:
            versions = run.effective()
            first = next((o for o in run.publications if o.version == self.poison), None)
            before = versions.get(self.poison - 1)
            if before is None:
                raise NotChecked(f"version {self.poison - 1} before it is missing")
            if first is None:
                raise Violation(f"{name}, whose advantages are infinite, was not published")
            if first.event.status != "skipped":
                raise Violation(f"{name} is {first.event.status!r}, its batch is poison")
            if first.event.digest != before.event.digest:
                raise Violation(f"{name} was skipped, and its weights changed")

    @rule("Read the trainer's output. If it is only slow, raise --limit.")
    async def makes_every_version(self) -> None:
        """Each version comes in time, also after kill -9 and a start."""
        failures = [failure for run in self.runs for failure in run.failures]
        require(not failures, "; ".join(failures))

    @rule(
        "Save model, optimizer, schedule and random state together with the checkpoint, and load "
        "all of them."
    )
    async def keeps_its_state(self) -> None:
        """A run with kills ends with the weights of a run without kills."""
        if self.killed is None or self.killed.failures:
            raise NotChecked("no run with kills came to its end")
        if self.distance <= NOISE * self.spread:
            return
        straight, killed = self.straight.effective(), self.killed.effective()
        both = sorted(straight.keys() & killed.keys())
        differ = (n for n in both if straight[n].event.digest != killed[n].event.digest)
        raise Violation(
            f"the weights differ from version {next(differ, None)} on. In the end their relative "
            f"distance is {self.distance:.3g}; that of two runs without kills is {self.spread:.3g}"
        )

    @rule(
        "Publish in transactions with the transactional id of the policy's trainer, and end when "
        "the broker fences you."
    )
    async def is_fenced(self) -> None:
        """A trainer that another one has replaced publishes nothing more."""
        if self.killed is None or self.killed.fenced is None:
            raise NotChecked("no run with kills came so far")
        require(not self.killed.fenced, self.killed.fenced)

    @rule("Leave SIGTERM alone, or stop in its handler: what was not published is made again.")
    async def ends_on_sigterm(self) -> None:
        """SIGTERM ends the process within 10 s."""
        for run in self.runs:
            if run.stopped_after_s is None:
                raise Violation(f"it was still running {SIGTERM_S:g} s after SIGTERM")

    @rule("End your own child processes, or start them so that they end with their parent.")
    async def leaves_no_process(self) -> None:
        """After SIGTERM no process of the trainer is left."""
        left = [command for run in self.runs for command in run.left_behind]
        if left:
            raise Violation(f"{len(left)} processes were left: {left[0]}")


def _stored(one: Publication) -> tuple[object, ...]:
    return one.event.digest, one.event.full, one.event.deltas
