"""Mutants of the scheduler: what starts, when, and how often."""

from tests.simulation.mutants.mutant import Mutant

CORE = "services/scheduler/core.py"
ROOM = "services/scheduler/policy_room.py"
LANES = "services/scheduler/lanes.py"
SERVICE = "services/scheduler/service.py"

OF_SCHEDULER = (
    Mutant(
        name="duplicate_submissions_accepted",
        sentence="Duplicate submissions are recognised, and refused.",
        file=CORE,
        old="if verdict is None and duplicate:",
        new="if verdict is None and duplicate and number < 0:",
        caught_by=("was submitted before as task",),
        faults=("submit again",),
    ),
    Mutant(
        name="live_limit_ignored",
        sentence="Limits: live episodes.",
        file=LANES,
        old="self.live + submitted.samples > self._episodes",
        new="self.live < 0",
        caught_by=("was started as live episode",),
        faults=(),
    ),
    Mutant(
        name="room_ignores_versions",
        sentence="Room counts how far batches are ahead of the newest published version.",
        file=ROOM,
        old="ahead = self.published - self.batch + self._settings.max_staleness + 1",
        new="ahead = self._settings.max_staleness + 1",
        caught_by=("I5: task",),
        faults=(),
    ),
    Mutant(
        name="room_counts_no_groups",
        sentence="Open groups take room.",
        file=ROOM,
        old="self._pool.fresh_groups(ahead) - len(self.open)",
        new="self._pool.fresh_groups(ahead)",
        caught_by=("I5: task",),
        faults=(),
    ),
    Mutant(
        name="room_before_version_0",
        sentence="There is no room before version 0.",
        file=ROOM,
        old="        if self.published is None:\n            return 0\n",
        new="        if self.published is None:\n            return self._settings.groups\n",
        caught_by=("had a version",),
        faults=("unreported",),
    ),
    Mutant(
        name="decided_groups_keep_their_room",
        sentence="Groups give their room back once a batch has decided them.",
        file=ROOM,
        old="        for number in [one for one in self.open if one in decided]:\n",
        new="        for number in list[int]():\n",
        caught_by=("I1: ", "I8: "),
        faults=(),
    ),
    Mutant(
        name="newest_task_first",
        sentence="Tasks are admitted in submission order.",
        file=LANES,
        old="weight, next(iter(queue))",
        new="weight, next(reversed(queue))",
        caught_by=("was started after task",),
        faults=(),
    ),
    Mutant(
        name="outcomes_read_before_their_tasks_are_known",
        sentence="What ended is counted once all starts are known: topics come in any order.",
        file=SERVICE,
        old="            if self._shard.caught_up:\n                self._on_progress(event)",
        new="            if True:\n                self._on_progress(event)",
        caught_by=("I1: EpisodeStarted", "I8: "),
        faults=("kill", "scheduler", "disorder"),
    ),
    Mutant(
        name="predecessors_starts_unread",
        sentence="What a predecessor started is started: the log says so.",
        file=SERVICE,
        old="                self._core.on_started(event)\n        elif",
        new="                pass\n        elif",
        caught_by=("I1: EpisodeStarted", "I8: ", "I5: "),
        faults=("kill", "scheduler"),
    ),
    Mutant(
        name="queued_tasks_committed",
        sentence="A task is held until nothing about it can change.",
        file=SERVICE,
        old="self._releases[number] = self._shard.hold(delivery)",
        new="self._releases[number] = lambda: None",
        caught_by=("I1: ", "I8: "),
        faults=("kill", "scheduler"),
    ),
    Mutant(
        name="starts_without_reports",
        sentence="Nothing starts for a policy of which no worker reports its load.",
        file="services/scheduler/worker_pools.py",
        old="            return not self._limits.require_reports\n",
        new="            return True\n",
        caught_by=("had reported",),
        faults=(),
    ),
    Mutant(
        name="tenants_limit_ignored",
        sentence="A tenant at its limit of live episodes is passed over.",
        file=LANES,
        old="most is None or live + samples <= most or",
        new="True or",
        caught_by=("of default",),
        faults=("tenants",),
    ),
)
