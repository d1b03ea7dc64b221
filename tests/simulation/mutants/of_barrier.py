"""Mutants of the barrier between policies."""

from tests.simulation.mutants.mutant import SCHEDULES, Mutant

BARRIER = "stream_jobs/barrier.py"
RULE = "schemas/version_barrier.py"

OF_BARRIER = (
    Mutant(
        name="one_version_too_far",
        sentence="A policy is at most `barrier.versions` ahead of the slowest one of its set.",
        file=RULE,
        old="return published is None or version - published > versions",
        new="return published is None or version - 1 - published > versions",
        caught_by=("is at",),
        faults=SCHEDULES,
    ),
    Mutant(
        name="nobody_passed_at_the_end",
        sentence="A policy without work left does not hold the others.",
        file=BARRIER,
        old="waits = now_s < quiet_s or any(",
        new="waits = True or any(",
        caught_by=("has decided",),
        faults=SCHEDULES,
    ),
    Mutant(
        name="passed_while_a_group_waits",
        sentence="A policy has work while a group of it is undecided.",
        file=BARRIER,
        old="in_flight or undecided or any",
        new="in_flight or any",
        caught_by=("is at",),
        faults=SCHEDULES,
    ),
    Mutant(
        name="passed_while_a_batch_is_trained",
        sentence="A policy has work while a batch of it is not published.",
        file=BARRIER,
        old="self.published is None or self.batch > self.published",
        new="self.published is None",
        caught_by=("is at",),
        faults=SCHEDULES,
    ),
)
