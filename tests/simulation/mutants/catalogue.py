"""All mutants, by name."""

from __future__ import annotations

from tests.simulation.mutants.mutant import Mutant
from tests.simulation.mutants.of_agents import OF_AGENTS
from tests.simulation.mutants.of_barrier import OF_BARRIER
from tests.simulation.mutants.of_batches import OF_BATCHES
from tests.simulation.mutants.of_environments import OF_ENVIRONMENTS
from tests.simulation.mutants.of_items import OF_ITEMS
from tests.simulation.mutants.of_limits import OF_LIMITS
from tests.simulation.mutants.of_replay import OF_REPLAY
from tests.simulation.mutants.of_scheduler import OF_SCHEDULER
from tests.simulation.mutants.of_signatures import OF_SIGNATURES
from tests.simulation.mutants.of_trainer import OF_TRAINER
from tests.simulation.mutants.of_workers import OF_WORKERS

MUTANTS: dict[str, Mutant] = {
    mutant.name: mutant
    for mutants in (
        OF_WORKERS,
        OF_SCHEDULER,
        OF_AGENTS,
        OF_ENVIRONMENTS,
        OF_BATCHES,
        OF_REPLAY,
        OF_BARRIER,
        OF_ITEMS,
        OF_LIMITS,
        OF_TRAINER,
        OF_SIGNATURES,
    )
    for mutant in mutants
}

EQUIVALENT: dict[str, str] = {
    "dropped groups keep their room": "the batch that decides them gives it back, a moment later",
    "ended tasks run again after a take-over": "their outcomes lie in the log too, and close them "
    "by the same TaskEnded",
    "an outcome in the log stops no run": "the first outcome counts, whoever wrote it, and the "
    "TaskEnded stops what still runs",
    "agents send while they catch up": "under the ids that are in the log already: work is done "
    "twice, and the first answer counts",
    "a taken-over episode goes on from its first attempt": "the failures of its attempts are "
    "recorded answers too, and lead it to the highest",
    "a repeated action is not answered again": "its answer was durable before it was repeated",
    "a skipped batch is trained on when it is replayed": "its content makes it unusable again; "
    "where it doesn't, the version is published as resumed",
    "a lost partition is committed once more": "the broker takes no commit of who doesn't hold it",
    "checkpoints are written in place": "one that is not whole has no manifest, or another digest",
    "a higher attempt in the log moves no live run": "attempts fail by recorded answers, which all "
    "owners read; of two that go apart the first outcome counts, and stops the other",
    "batches are decided while their writer catches up": "a batch is right for what was read, and "
    "says what that was: only a fuller one was to be had",
    "what was interrupted is answered": "an engine closes after its shards, which send no more",
}
"""Sentences whose loss breaks no promise, for the code has a second net: no mutants for these."""
