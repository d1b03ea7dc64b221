"""Inspect's own package reads the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import UsageError
from tests.unit.operate.trajectories.test_atif import an_episode

pytestmark = [pytest.mark.heavy, pytest.mark.long]


@pytest.mark.parametrize("name", ["log.eval", "log.json"])
def test_inspect_reads_what_was_exported(name: str, tmp_path: Path) -> None:
    from inspect_ai.log import read_eval_log

    from headrace.services.operate.trajectories.inspect_log import InspectWriter

    writer = InspectWriter(tmp_path / name, "exp")
    writer.write(an_episode())
    writer.close()
    log = read_eval_log(str(tmp_path / name))
    assert (log.status, log.eval.task) == ("success", "exp")
    assert log.results is not None
    assert log.results.scores[0].metrics["mean"].value == 0.5
    assert log.samples is not None
    assert [(one.id, one.epoch) for one in log.samples] == [("17", 4), ("17/2", 4)]
    for sample, last in zip(log.samples, (1, 2), strict=True):
        texts = [message.text for message in sample.messages]
        assert texts == ["context 0", "answer 0", f"context {last}", f"answer {last}"]
        assert sample.scores is not None
        assert sample.scores["reward"].value == 0.5
        assert sample.output.completion == f"answer {last}"


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    from headrace.services.operate.trajectories.inspect_log import InspectWriter

    with pytest.raises(UsageError, match=r"\.eval or \.json"):
        InspectWriter(tmp_path / "log.txt", "exp")
