"""Which tasks start while a policy waits at the barrier for another one."""

from __future__ import annotations

from itertools import count

from headrace.schemas.events import Sampling, TaskSubmitted, Use
from headrace.schemas.frontier import Frontier
from headrace.schemas.recipe.recipe import Recipe
from tests.whole_core import WholeCore

GROUPS, WAITING = 2, 3
RECIPE = Recipe.model_validate(
    {
        "name": "r",
        "tasks": {"samples": 1, "roles": {"kept": "kept", "dropped": "dropped"}},
        "scheduler": {"live_episodes": 1, "require_reports": False},
        "barrier": {"versions": 1, "waiting_batches": WAITING},
        "policies": {
            name: {"model": "tiny", "batches": {"groups": GROUPS, "max_staleness": 1}}
            for name in ("kept", "dropped")
        },
    }
)


class Starts:
    """Plays one task after the other. Each gives a group that `kept` keeps and `dropped` drops."""

    def __init__(self) -> None:
        self.core = WholeCore(RECIPE)
        for policy in ("kept", "dropped"):
            self.core.on_policy(policy, 0)
        self._numbers = count()

    def play(self, most: int = 1_000) -> int:
        """Plays tasks until none may start any more. Returns how many did."""
        for played in range(most):
            number = next(self._numbers)
            self.core.on_task(number, _task(number))
            starts = self.core.next_start(1.0)
            if not starts:
                return played
            for start in starts:
                self.core.on_started(start)
                self.core.on_outcome(start.task, start.sample)
                self.core.on_group("kept", start.task, oldest=0, tokens=1)
                self.core.on_group("dropped", start.task, oldest=None)
        return most


def _task(number: int) -> TaskSubmitted:
    roles = {
        name: Use(policy=name, sampling=Sampling(max_tokens=1)) for name in ("kept", "dropped")
    }
    return TaskSubmitted(
        source="s", task_id=str(number), item_id="i", agent="default", roles=roles,
        max_turns=1, max_tokens=1, deadline_s=60,
    )  # fmt: skip


def at_barrier() -> Starts:
    """`kept` has trained on batch 1, and waits with the next one for version 1 of `dropped`."""
    starts = Starts()
    assert starts.play(GROUPS) == GROUPS
    starts.core.on_batch("kept", 1, Frontier(GROUPS))
    starts.core.on_policy("kept", 1)
    return starts


def test_the_room_of_a_policy_that_waits_does_not_hold_back_tasks() -> None:
    starts = at_barrier()
    room = GROUPS * (1 + 1)
    assert starts.play(room) == room
    assert starts.core.room()["kept"] <= 0
    assert starts.play(1) == 1, "the other one has no group yet"


def test_tasks_stop_when_enough_batches_of_a_policy_that_waits_are_full() -> None:
    starts = at_barrier()
    assert starts.play() == GROUPS * WAITING
    starts.core.on_batch("dropped", 1, Frontier(GROUPS * (WAITING + 1)))
    assert starts.play() == 0, "its batch is not published"
    starts.core.on_policy("dropped", 1)
    starts.core.on_batch("kept", 2, Frontier(GROUPS * (WAITING + 1)))
    assert starts.play() > 0
