"""Mutants of what batches train on again, and of the selection of samples."""

from tests.simulation.mutants.mutant import Mutant

POOL = "schemas/replay_pool.py"
SELECTION = "stream_jobs/selection.py"

OF_REPLAY = (
    Mutant(
        name="replayed_too_old",
        sentence="A replayed sample is at most max_age versions behind.",
        file=POOL,
        old="<= self._replay.max_age\n",
        new="<= self._replay.max_age + 9\n",
        caught_by=("versions behind",),
        faults=("replay",),
    ),
    Mutant(
        name="skipped_batches_replayed",
        sentence="What a skipped batch had is not replayed: it may be what spoiled the batch.",
        file=POOL,
        old="            and not any(map(self._staleness.skipped, group.batches))\n",
        new="",
        caught_by=("which was skipped",),
        faults=("replay", "batches unusable"),
    ),
    Mutant(
        name="replayed_before_it_is_trained",
        sentence="A group is replayed once it is known that its newest batch was trained.",
        file=POOL,
        old="group.batches[-1] <= self._newest - self._settings.prefetch",
        new="group.batches[-1] <= self._newest",
        caught_by=("may be untrained",),
        faults=("replay",),
    ),
    Mutant(
        name="replayed_samples_fresh_again",
        sentence="A replayed sample states in how many batches it was, and its weight.",
        file=POOL,
        old='changes = {"use": use, "weight": weight**use}',
        new='changes = {"use": 1, "weight": weight}',
        caught_by=(": sample",),
        faults=("replay",),
    ),
    Mutant(
        name="pool_forgotten_by_the_successor",
        sentence="A new assembler reads as many batches as the pool needs.",
        file="stream_jobs/assemble_batches.py",
        old="return [found[version] for version in sorted(found)][-count:]",
        new="return [found[version] for version in sorted(found)][-1:]",
        caught_by=("I9: ",),
        faults=("replay", "kill", "assemble-batches", "aimed"),
    ),
    Mutant(
        name="unselected_samples_not_in_the_mean",
        sentence="All samples count in a group's mean, also those that are not selected.",
        file="stream_jobs/groups.py",
        old='"mean": fmean(one.reward for one in sampled)',
        new='"mean": fmean(one.reward for one in kept)',
        caught_by=("states the mean",),
        faults=("best_of",),
    ),
    Mutant(
        name="advantages_of_unselected_samples",
        sentence="Advantages follow from the selected samples, if the recipe says nothing else.",
        file="stream_jobs/groups.py",
        old="for sample in sampled if self._selector.compares_all else kept:",
        new="for sample in sampled:",
        caught_by=("other advantages",),
        faults=("best_of",),
    ),
)
