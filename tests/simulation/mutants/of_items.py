"""Mutants of the statistics of items, and of the choice of items and opponents."""

from tests.simulation.mutants.mutant import Mutant

SOURCE = "services/tasks/curation/curated_source.py"
FOLD = "services/tasks/curation/item_statistics.py"

OF_ITEMS = (
    Mutant(
        name="items_count_a_task_twice",
        sentence="The first group of a task counts, and a second one changes nothing.",
        file=FOLD,
        old="return first and later",
        new="return later",
        caught_by=("I3: item",),
        faults=("kill", "assemble-groups", "repeat"),
    ),
    Mutant(
        name="items_counted_again_after_a_restart",
        sentence="A successor counts from the newest group that its predecessor counted.",
        file=FOLD,
        old="CountedTasks(event.low_mark, event.groups_read, event.group)",
        new="CountedTasks(event.low_mark, event.groups_read)",
        caught_by=("I3: item",),
        faults=("kill", "item-statistics"),
    ),
    Mutant(
        name="items_forget_which_tasks_are_counted",
        sentence="A record says from which group the counted tasks must be read again.",
        file=FOLD,
        old="return self._above[0][0] if self._above else self._next_offset",
        new="return self._next_offset",
        caught_by=("I3: item",),
        faults=(),
    ),
    Mutant(
        name="items_begin_after_the_newest_counted_group",
        sentence="A successor reads the groups again that say which tasks are counted.",
        file="services/tasks/curation/read_items.py",
        old="return max(wanted, kept)",
        new="return max(wanted, kept, newest + 1)",
        caught_by=("I3: item",),
        faults=("kill", "item-statistics"),
    ),
    Mutant(
        name="curators_forget_groups",
        sentence="A successor chooses by all groups of the log.",
        file=SOURCE,
        old="            curation.on_group(*queued)\n        clock",
        new="            pass\n        clock",
        caught_by=("I9: task",),
        faults=("kill", "source", "curators"),
    ),
    Mutant(
        name="curators_forget_their_state",
        sentence="A successor continues with the state of each curator.",
        file="services/tasks/curation/choose_items.py",
        old='                fold.restore(state["folds"][name])\n',
        new='                assert name in state["folds"]\n',
        caught_by=("I9: task",),
        faults=("kill", "source", "curators"),
    ),
    Mutant(
        name="curators_draw_by_chance",
        sentence="The seed, the task and the curator give the random number.",
        file="services/tasks/curation/choose_items.py",
        old="json.dumps([seed, task_id, index])",
        new="__import__('uuid').uuid4().hex",
        caught_by=("I9: task",),
        faults=("curators",),
    ),
    Mutant(
        name="opponents_drawn_by_chance",
        sentence="The seed and the newest opponent give the opponent.",
        file="services/tasks/league.py",
        old='random.Random(f"{self._seed}/{newest}")',
        new="random.Random()",
        caught_by=("I9: version",),
        faults=("league",),
    ),
    Mutant(
        name="opponents_older_than_their_label",
        sentence="The label names the newest opponent when the task was made.",
        file="services/tasks/league.py",
        old="LABEL + policy: str(version) for policy, version in newest.items()",
        new="LABEL + policy: '0' for policy, version in newest.items()",
        caught_by=("I9: version",),
        faults=("league",),
    ),
)
