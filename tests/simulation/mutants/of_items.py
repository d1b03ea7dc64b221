"""Mutants of the statistics of items."""

from tests.simulation.mutants.mutant import Mutant

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
)
