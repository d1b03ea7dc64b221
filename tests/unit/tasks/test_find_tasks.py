"""Which tasks `headrace cancel` finds and cancels if tenants have keys."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from headrace.errors import UsageError
from headrace.schemas.events import TaskCancelled, TaskSubmitted
from headrace.schemas.topics import CANCELLATIONS
from headrace.services.tasks.cancellation import (
    CancelledTasks,
    TaskStatus,
    find_tasks,
    send_cancellations,
)
from tests.unit.log.test_request_signatures import (
    OPERATOR,
    OTHER,
    STRANGER,
    TEAM,
    TRUSTED,
    Scene,
)
from tests.unit.scheduler.test_core import task

Who = Ed25519PrivateKey | None


def one(tenant: str, task_id: str = "t") -> TaskSubmitted:
    return task(0, tenant=tenant, task_id=task_id)


def cancelled(
    submitted: Sequence[tuple[TaskSubmitted, Who]],
    by: Who,
    *ids: str,
    source: str | None = "test",
    all_queued: bool = False,
) -> tuple[list[TaskStatus], CancelledTasks]:
    """Submits tasks, whoever signs them, and cancels: what was found, and what is cancelled."""

    async def main() -> tuple[list[TaskStatus], CancelledTasks]:
        scene = Scene()
        await scene.apply()
        for event, key in submitted:
            await scene.log(key, trusted=False).send(event)
        log = scene.log(by)
        found = await find_tasks(log, ids, source, all_queued=all_queued)
        await send_cancellations(log, found, "why")
        tasks = CancelledTasks(TRUSTED)
        for delivery in await scene.read(CANCELLATIONS):
            assert isinstance(delivery.event, TaskCancelled)
            tasks.add(delivery.event, delivery.signed_by(TRUSTED.keys))
        return found, tasks

    return asyncio.run(main())


@pytest.mark.parametrize("forger", [None, STRANGER, OTHER])
def test_a_forged_task_does_not_hide_the_true_one(forger: Who) -> None:
    found, tasks = cancelled([(one("team"), forger), (one("team"), TEAM)], TEAM, "t")
    assert [(status.number, status.state) for status in found] == [(1, "queued")]
    assert tasks.reason(one("team")) == "why"


def test_a_task_of_an_open_tenant_does_not_hide_the_one_of_a_tenant_with_keys() -> None:
    found, tasks = cancelled([(one("guest"), None), (one("team"), TEAM)], TEAM, "t")
    assert [status.number for status in found] == [0, 1]
    assert tasks.reason(one("team")) == "why"


def test_tasks_of_the_same_id_that_need_another_key_are_left_out() -> None:
    found, tasks = cancelled([(one("other"), OTHER), (one("team"), TEAM)], TEAM, "t")
    assert [status.number for status in found] == [1]
    assert tasks.reason(one("other")) is None
    with pytest.raises(UsageError, match="task 0 can't be cancelled"):
        cancelled([(one("other"), OTHER)], TEAM, "t")


def test_an_operator_cancels_the_task_that_it_names_and_no_other_of_this_id() -> None:
    submitted = [(one("team"), TEAM), (one("other"), OTHER), (one("guest"), None)]
    _, tasks = cancelled(submitted, OPERATOR, "1", source=None)
    assert [tasks.reason(event) for event, _ in submitted] == [None, "why", None]


def test_a_refused_task_is_not_cancelled() -> None:
    found, tasks = cancelled([(one("team"), None)], TEAM, "0", source=None)
    assert [status.state for status in found] == ["refused"]
    assert tasks.reason(one("team")) is None


def test_a_task_that_comes_later_is_cancelled_for_the_tenants_of_the_key() -> None:
    (guests,), tasks = cancelled([], None, "t")
    assert (guests.state, guests.counts_for) == ("unknown", "tenants without keys")
    assert (tasks.reason(one("team")), tasks.reason(one("guest"))) == (None, "why")
    (mine,), tasks = cancelled([], TEAM, "t")
    assert mine.counts_for == "tenants without keys, tenant team"
    assert tasks.reason(one("team")) == "why"
    (every,), _ = cancelled([], OPERATOR, "t")
    assert every.counts_for == ""


def test_a_cancellation_that_counts_for_nobody_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "tests.unit.log.test_request_signatures.TRUSTED",
        type(TRUSTED)(TRUSTED.tenants, TRUSTED.operators, required=True),
    )
    with pytest.raises(UsageError, match="task test/t can't be cancelled"):
        cancelled([], None, "t")


def test_all_that_is_queued_is_what_the_key_may_cancel() -> None:
    submitted = [
        (one("team", "a"), TEAM),
        (one("other", "b"), OTHER),
        (one("guest", "c"), None),
        (one("team", "d"), None),
    ]
    found, tasks = cancelled(submitted, TEAM, source=None, all_queued=True)
    assert [status.state for status in found] == ["queued", "left", "queued"]
    assert [tasks.reason(event) for event, _ in submitted] == ["why", None, "why", None]
