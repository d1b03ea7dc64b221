from __future__ import annotations

from pathlib import Path

from headrace.services.base.files import describe_log, private, private_folder


def test_log_is_described_by_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "kafka.log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))

    described = describe_log(log)

    assert described.startswith(f"the last lines of {log}:")
    assert described.splitlines()[1:] == [f"  line {number}" for number in range(80, 100)]
    assert "(nothing)" in describe_log(tmp_path / "absent.log")


def test_private_folders_and_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    private_folder(tmp_path / "state" / "logs")
    with open(tmp_path / "state" / "logs" / "log", "ab", opener=private):
        pass
    private_folder(tmp_path / "state" / "logs")
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"state": 0o700, "logs": 0o700, "log": 0o600}
    assert tmp_path.stat().st_mode & 0o777 == 0o755, "a folder that exists keeps its mode"
