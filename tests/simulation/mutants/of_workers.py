"""Mutants of what all workers share: take-over, commits, dead letters, sole writers."""

from tests.simulation.mutants.mutant import Mutant

OF_WORKERS = (
    Mutant(
        name="commit_past_what_is_held",
        sentence="The commit is the oldest start whose task has no delivered TaskEnded.",
        file="services/worker/shard.py",
        old="        release = self.open_records.hold(delivery.offset, long=long)\n",
        new="        release = lambda: None\n",
        caught_by=("I1: ", "I8: "),
    ),
    Mutant(
        name="positions_as_they_stand_at_the_commit",
        sentence="The four other positions are noted as they stood when that start was first read.",
        file="services/worker/shard_host.py",
        old="offset, positions = oldest.offset, oldest.positions",
        new="offset, positions = oldest.offset, self.positions",
        caught_by=("I1: ", "I2: ", "I8: "),
    ),
    Mutant(
        name="send_while_catching_up",
        sentence="First it reads all of p to the ends seen at assignment, sending nothing.",
        file="services/worker/shard_host.py",
        old="if not self.behind and not self.context.caught_up",
        new="if not self.context.caught_up",
        caught_by=("I1: ", "I2: "),
    ),
    Mutant(
        name="no_fencing_of_shards",
        sentence="The scheduler writes through a transactional producer that cuts off others.",
        file="services/worker/worker.py",
        old="writer = await self.log.broker.fenced(self.fenced) if self.fenced else None",
        new="""\
writer = (
            await self.log.broker.fenced(f"{self.fenced}.{self.log.source}")
            if self.fenced
            else None
        )""",
        caught_by=("I1: EpisodeStarted", "I5: "),
        faults=("expel",),
    ),
    Mutant(
        name="undecodable_skipped",
        sentence="What is no event goes to dead-letters, whole, with the reason.",
        file="services/log/event_log.py",
        old="            await self.dead_letter(record, error.reason)\n",
        new="            del error\n",
        caught_by=("is no event, and in no dead letter",),
        faults=("garbage",),
    ),
    Mutant(
        name="references_lead_anywhere",
        sentence="A record that refers to a namespace that the recipe does not name is no event.",
        file="services/log/event_log.py",
        old="        check_trajectories(event, self.topics, record.value)\n",
        new="",
        caught_by=("I2: ", "I3: "),
        faults=("garbage",),
    ),
    Mutant(
        name="what_was_deleted_is_passed_over",
        sentence="An offset out of range is a loud error: nobody reads on elsewhere.",
        file="tests/memory/memory_log.py",
        old="        self.check(position)\n        records",
        new="        position = max(position, self.first)\n        records",
        caught_by=("I1: ", "I8: "),
        faults=("truncation", "engine slow"),
    ),
)
