from __future__ import annotations

from pathlib import Path

from headrace.services.base.files import describe_log


def test_log_is_described_by_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "kafka.log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))

    described = describe_log(log)

    assert described.startswith(f"the last lines of {log}:")
    assert described.splitlines()[1:] == [f"  line {number}" for number in range(80, 100)]
    assert "(nothing)" in describe_log(tmp_path / "absent.log")
