"""What the contract suites share. Their helpers are modules: a conftest's own name isn't unique."""

from __future__ import annotations

import pytest

from tests.contract.broker_logs import KafkaLog, Log, MemoryLog


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.stack)])
def log(request: pytest.FixtureRequest) -> Log:
    """Each of the two logs. Kafka must start: a missing one fails, and is never passed over."""
    if request.param == "memory":
        return MemoryLog()
    return KafkaLog(request.getfixturevalue("kafka"))
