"""Mutants of the limits that workers share: what each may use, and when others get it."""

from tests.simulation.mutants.mutant import Mutant

DIVISION = "services/scheduler/limits/limit_division.py"
HELD = "services/worker/limits/held_limits.py"
BROKEN = ("limit: policies",)

OF_LIMITS = (
    Mutant(
        name="environments_without_limit",
        sentence="A task waits while its environment has as many live episodes as it may have.",
        file="services/scheduler/core.py",
        old="return Chance.STARTS if is_free else Chance.FULL",
        new="return Chance.STARTS",
        caught_by=("I8: task",),
        faults=("environment limits",),
    ),
    Mutant(
        name="ended_episodes_count_in_their_environment",
        sentence="An episode counts in its environment until it has ended.",
        file="services/scheduler/environment_room.py",
        old="self._live[name] += episodes",
        new="self._live[name] += max(0, episodes)",
        caught_by=("I8: not drained",),
        faults=("environment limits",),
    ),
    Mutant(
        name="units_given_on_while_they_are_held",
        sentence="A share that shrinks leaves its units reserved until its worker holds no more.",
        file=DIVISION,
        old="held.reserved = max(held.units, use.held)",
        new="held.reserved = held.units",
        caught_by=BROKEN,
        faults=("call limits", "engine slow"),
    ),
    Mutant(
        name="units_free_before_their_period_is_over",
        sentence="A call of a limit with a period keeps its unit until the period is over.",
        file=HELD,
        old="one.cooling.append(now_s + one.period_s)",
        new="one.cooling.append(now_s + one.period_s / 2)",
        caught_by=BROKEN,
        faults=("call limits",),
    ),
)
