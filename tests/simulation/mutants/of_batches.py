"""Mutants of the stream jobs: groups and batches."""

from tests.simulation.mutants.mutant import Mutant

CORE = "stream_jobs/batches.py"
WAITING = "stream_jobs/waiting_groups.py"
JOB = "stream_jobs/assemble_batches.py"
GROUPS = "stream_jobs/groups.py"
COUNTED = "stream_jobs/counted_samples.py"

OF_BATCHES = (
    Mutant(
        name="failed_samples_counted_as_0",
        sentence="A sample that failed is excluded with the reason, and never counted as 0.",
        file=COUNTED,
        old="""\
    if failure is not None and failure.origin == "infrastructure":
        return failure.code
    if outcome.ending in ("failed", "cancelled"):
        return failure.code if failure is not None else outcome.ending
    if outcome.reward is None or outcome.trajectory is None:
""",
        new="""\
    outcome = outcome.model_copy(update={"reward": outcome.reward or 0.0})
    if outcome.reward is None or outcome.trajectory is None:
""",
        caught_by=("I6: ",),
        faults=("environment fails", "engine fails"),
    ),
    Mutant(
        name="no_group_if_nothing_is_learned",
        sentence="Every TaskEnded yields a GroupClosed for every policy, else the low mark stalls.",
        file=GROUPS,
        old="return [scorer.close(ended, recorded_at_ms) for scorer in self._scorers]",
        new="""\
closed = [scorer.close(ended, recorded_at_ms) for scorer in self._scorers]
        return [group for group in closed if group.verdict == "scored"]""",
        caught_by=("I3: ", "I8: "),
        faults=(),
    ),
    Mutant(
        name="advantages_without_the_stale",
        sentence="Advantages are computed once over the whole group.",
        file=GROUPS,
        old="for sample in sampled if self._selector.compares_all else kept:",
        new="for sample in kept[1:]:",
        caught_by=("other advantages",),
        faults=(),
    ),
    Mutant(
        name="masked_samples_trained",
        sentence="A masked sample counts in its group, and is not trained on.",
        file=GROUPS,
        old="                if not one.masked\n",
        new="",
        caught_by=("I3: ",),
        faults=("limits",),
    ),
    Mutant(
        name="decided_groups_taken_again",
        sentence="A late duplicate is below the frontier, and ignored whenever it comes.",
        file=CORE,
        old="if group.task not in self._frontier and group.task not in self._waiting:",
        new="if group.task not in self._waiting:",
        caught_by=("I3: ",),
        faults=("kill", "repeat"),
    ),
    Mutant(
        name="frontier_without_runs",
        sentence="Each batch records what is decided: a low mark plus runs above it.",
        file=CORE,
        old="decided=tuple(Run(first=first, last=last) for first, last in frontier.runs)",
        new="decided=()",
        caught_by=("I3: ",),
        faults=(),
    ),
    Mutant(
        name="runs_not_read_back",
        sentence="The frontier of the last batch is restored whole: mark and runs.",
        file=CORE,
        old="self._frontier = batch.frontier()",
        new="self._frontier = Frontier(batch.low_mark)",
        caught_by=("I3: ",),
        faults=(),
    ),
    Mutant(
        name="groups_read_beyond_the_open",
        sentence="groups_read is the offset of the oldest open group.",
        file=CORE,
        old="groups_read=self._waiting.groups_read(self._next_offset, frontier)",
        new="groups_read=self._next_offset",
        caught_by=("I3: ",),
        faults=(),
    ),
    Mutant(
        name="demonstrations_go_stale",
        sentence="What was demonstrated was drawn by no version, and is never stale.",
        file="schemas/staleness.py",
        old="        if oldest < 0:\n            return 0\n",
        new="",
        caught_by=("as stale, and is 0 versions behind",),
        faults=("demonstrations",),
    ),
    Mutant(
        name="demonstrations_are_rewarded",
        sentence="Estimators see only what the policy sampled itself.",
        file=GROUPS,
        old="sampled = [sample for sample in counted if not sample.demonstrated]",
        new="sampled = list(counted)",
        caught_by=("I3: ",),
        faults=("demonstrations",),
    ),
    Mutant(
        name="staleness_bound_too_wide",
        sentence="Samples more than max_staleness behind n - 1 are dropped.",
        file=WAITING,
        old="        elif slack < 0:\n",
        new="        elif slack < -1:\n",
        caught_by=("versions behind",),
        faults=(),
    ),
    Mutant(
        name="staleness_bound_too_narrow",
        sentence="Samples that are max_staleness behind n - 1 are trained on.",
        file=WAITING,
        old="        elif slack < 0:\n",
        new="        elif slack < 1:\n",
        caught_by=("is dropped as stale",),
        faults=(),
    ),
    Mutant(
        name="stale_samples_cut_out_of_their_group",
        sentence="What the policy sampled of a group is trained whole or dropped whole.",
        file=WAITING,
        old="fresh = tuple(sample for sample in group.samples if sample.oldest_version < 0)",
        new="fresh = tuple(s for s in group.samples if self.slack(s.oldest_version, newest) >= 0)",
        caught_by=("is trained in part", "it holds"),
        faults=(),
    ),
    Mutant(
        name="staleness_judged_once",
        sentence="Staleness is that of the batch which trains a sample.",
        file=WAITING,
        old="            task: self._judge(waiting.group, waiting.offset, newest)\n",
        new="            task: waiting\n",
        caught_by=("versions behind",),
        faults=(),
    ),
    Mutant(
        name="dropped_groups_left_open",
        sentence="A batch decides dropped groups too, so that they give their room back.",
        file=CORE,
        old="        unfit = list(fitting(unfit, taken))\n",
        new="        unfit = list[WaitingGroup]()\n",
        caught_by=("I3: ", "I8: "),
        faults=(),
    ),
    Mutant(
        name="prefetch_ignored",
        sentence="Batch n is emitted when n - 1 - newest published <= prefetch.",
        file=CORE,
        old="and self._version - self._published <= self._settings.prefetch",
        new="and self._version - self._published <= self._settings.prefetch + 1",
        caught_by=("was assembled when",),
        faults=(),
    ),
    Mutant(
        name="filtered_tasks_not_in_the_mean_reward",
        sentence="A batch carries the mean reward of all tasks it decides, filtered ones too.",
        file=CORE,
        old="            for waiting in deciding\n            # The mean",
        new="            for waiting in chosen\n            # The mean",
        caught_by=("that of its tasks is",),
        faults=(),
    ),
    Mutant(
        name="last_batch_unread",
        sentence="A new assembler reads its predecessor's last batch before it decides.",
        file=JOB,
        old="            assembler.on_batch(batch)\n        logger",
        new="            pass\n        logger",
        caught_by=("I3: ", "I5: ", "I8: "),
        faults=("kill", "assemble-batches"),
    ),
    Mutant(
        name="batches_not_fenced",
        sentence="A sole writer is fenced by the broker.",
        file=JOB,
        old="        await log.send_all(writer, [batch])\n",
        new="        await log.send(batch)\n",
        caught_by=("I3: ", "I5: "),
        faults=("freeze", "twin"),
    ),
    Mutant(
        name="batches_never_short",
        sentence="After `batch_wait` a batch may be short, so that nothing waits for ever.",
        file=CORE,
        old="if live or now_s < self._changed_s + self._settings.batch_wait_s:",
        new="if True:",
        caught_by=("I8: ",),
        faults=(),
    ),
    Mutant(
        name="frontier_apart_from_its_batch",
        sentence="One record is both batch and frontier: neither is there without the other.",
        file=JOB,
        old="""\
            assembler.on_batch(batch)
        logger""",
        new="""\
            loop = asyncio.get_running_loop()
            assembler.on_batch(batch.model_copy(update=getattr(loop, "frontier_apart", {})))
        original = assembler.on_batch

        def on_batch(batch: BatchAssembled) -> None:
            # Written after the batch, to another store: lost if the process dies between.
            original(batch)
            names = ("low_mark", "decided", "groups_read")
            frontier = {name: getattr(batch, name) for name in names}
            asyncio.get_running_loop().call_later(
                1.0, setattr, asyncio.get_running_loop(), "frontier_apart", frontier
            )

        assembler.on_batch = on_batch  # type: ignore[method-assign]
        logger""",
        caught_by=("I3: ",),
        faults=("kill", "assemble-batches", "aimed"),
    ),
    Mutant(
        name="unknown_outcome_taken_for_written",
        sentence="A commit whose outcome is unknown ends the process; a new one finds out.",
        file="tests/memory/memory_broker.py",
        old="        if unknown:\n            self._broken",
        new="        if unknown and not unknown:\n            self._broken",
        caught_by=("I1: ", "I3: ", "I4: ", "I5: ", "I8: ", "RecordsLost"),
        faults=("kill", "assemble-batches", "unknown_commits"),
    ),
)
