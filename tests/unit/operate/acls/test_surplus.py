"""Which ACLs of a namespace are not needed, and which of them are left in any case."""

from __future__ import annotations

from headrace.schemas.topics import TRAJECTORIES, Topics
from headrace.services.kafka.broker import Permission
from headrace.services.operate.acls.grant import Grants, for_other_runs, surplus_of


def test_what_another_run_reads_is_left() -> None:
    topics = Topics("second", ("default",), 1, reads_from=["first"])
    first = Grants.of(Topics("first", ("default",), 1), "User:b", ["env"])
    second = Grants.of(topics, "User:b", ["trainer"])
    trajectories = TRAJECTORIES.real_name("first")
    odd = Permission("User:b", "TOPIC", "first.cancellations.v1", "WRITE")
    surplus = surplus_of({*first.every, *second.every, odd}, first)
    assert odd in surplus
    assert not for_other_runs(odd)
    others = [one for one in surplus if one != odd]
    assert {one.name for one in others} == {trajectories}
    assert others == [one for one in surplus if for_other_runs(one)]
    assert not for_other_runs(Permission("User:a", "TOPIC", trajectories, "WRITE"))
