"""The lag of a process is that of all its consumers."""

from __future__ import annotations

from headrace.services.base.lag import LAG, Lag


def shown(topic: str) -> float:
    return float(LAG.labels(topic)._value.get())


def test_consumers_of_one_topic_add_up_and_leave_nothing() -> None:
    first, second = Lag(), Lag()
    first.show({"lag-a": 5, "lag-b": 1})
    second.show({"lag-a": 2})
    assert (shown("lag-a"), shown("lag-b")) == (7, 1)
    first.show({"lag-a": 3})
    assert (shown("lag-a"), shown("lag-b")) == (5, 0)
    first.show({})
    second.show({})
    assert shown("lag-a") == 0
