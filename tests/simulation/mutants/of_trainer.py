"""Mutants of the trainer: versions, checkpoints, and what follows a restart."""

from tests.simulation.mutants.mutant import Mutant

LOOP = "trainer/loop.py"
SESSION = "trainer/contract/training_session.py"
PUBLISH = "trainer/publish.py"

OF_TRAINER = (
    Mutant(
        name="resumed_without_retraining",
        sentence="On resume it retrains silently up to the newest published version.",
        file=SESSION,
        old="            await self._compare(weights)\n        partition = ",
        new="""\
            self.version = self.history.newest.version
            await self._compare(weights)
        partition = """,
        caught_by=("I4: ", "I8: "),
        faults=("kill", "trainer"),
    ),
    Mutant(
        name="resumed_from_the_start",
        sentence="It continues from the newest valid checkpoint, model and position together.",
        file=LOOP,
        old="            await self._in_thread(lambda: self._learner.load(state))\n",
        new="",
        caught_by=("I4: ",),
        faults=("kill", "trainer"),
    ),
    Mutant(
        name="resumed_weights_unpublished",
        sentence="If the digest differs from the published one, it publishes that version again.",
        file=PUBLISH,
        old="        if stored != StoredVersion.of(newest):\n",
        new="        if stored.digest == b'':\n",
        caught_by=("I4: ",),
        faults=("kill", "weights differ", "trainer"),
    ),
    Mutant(
        name="resumed_without_need",
        sentence="It publishes a version again only if its weights came out different.",
        file=PUBLISH,
        old="        if stored != StoredVersion.of(newest):\n",
        new="        if stored.digest != b'':\n",
        caught_by=("I4: version",),
        faults=("kill", "trainer"),
    ),
    Mutant(
        name="skipped_published_as_trained",
        sentence="A poison batch is published as skipped, weights unchanged.",
        file=LOOP,
        old='return "skipped", metrics',
        new='return "trained", metrics',
        caught_by=("I4: ",),
        faults=("batches unusable",),
    ),
    Mutant(
        name="old_weights_published",
        sentence="Batch n trains version n.",
        file=SESSION,
        old="        weights = await source()\n        loop = ",
        new="""\
        made = await source()
        weights = self.__dict__.get("before", None) or made
        self.__dict__["before"] = made
        loop = """,
        caught_by=("I4: ",),
        faults=(),
    ),
    Mutant(
        name="checkpoint_of_another_position",
        sentence="Position and model state of a checkpoint are atomic.",
        file=SESSION,
        old="return Checkpoint(self.version, self.offset, self.stored.digest)",
        new="return Checkpoint(self.version, self.offset + 2, self.stored.digest)",
        caught_by=("I4: ", "I8: ", "is due"),
        faults=("kill", "trainer"),
    ),
    Mutant(
        name="versions_not_fenced",
        sentence="The trainer is a sole writer, fenced by the broker.",
        file=PUBLISH,
        old="        await self.log.send_all(self.writer, [published], self.signer)\n",
        new="        await self.log.send(published)\n",
        caught_by=("I4: ", "I5: "),
        faults=("freeze", "twin", "trainer"),
    ),
    Mutant(
        name="published_history_unread",
        sentence="It reads what it published before it publishes more.",
        file=PUBLISH,
        old="                history.add(event, delivery.number)\n",
        new="                pass\n",
        caught_by=("I4: ", "I5: "),
        faults=("kill", "trainer"),
    ),
    Mutant(
        name="foreign_checkpoint_taken",
        sentence="A checkpoint counts only with a digest that the log published.",
        file=SESSION,
        old="return checkpoint.digest in digests.get(checkpoint.version, ())",
        new="return checkpoint.version in digests or bool(checkpoint.digest)",
        caught_by=("I4: ", "I5: "),
        faults=("damage", "trainer"),
    ),
)
