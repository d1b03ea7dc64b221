"""`headrace sft` as its users start it: rows, bad rows, Ctrl-C, recorded episodes, processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from headrace.services.models.weights import weights_digest
from tests.integration.conftest import RECIPE

RUN_S = 240.0
CHAT = (
    *("quickstart", "--set", "policies.default.model=tiny-chat", "--learning-rate", "0.01"),
    *("--set", "policies.default.sampling.allowed=[]"),
    *("--set", "policies.default.sampling.max_tokens=16"),
)


def sft(*arguments: str, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Runs the command to its end. Returns its exit code, and what it said and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "sft", *arguments],
        env=environment, capture_output=True, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr, done.stdout


def rows(folder: Path, count: int) -> Path:
    lines = [
        {"messages": [{"role": "user", "content": f"{number}?"},
                      {"role": "assistant", "content": "yes"}]}
        for number in range(count)
    ]  # fmt: skip
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_rows_become_a_model_and_bad_ones_are_named(tmp_path: Path) -> None:
    path = rows(tmp_path, 40)
    with path.open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "?"}]}\n{"prompt": ')
    target = ("--to", str(tmp_path / "made"))
    code, said, _ = sft(*CHAT, str(path), *target)
    assert code == 2, said
    assert f"{path}:41: it has no message of the assistant to learn" in said
    assert f"{path}:42: it is not JSON" in said
    assert not (tmp_path / "made").exists()

    code, said, printed = sft(
        *CHAT, str(path), *target, "--skip-bad", "--batch-tokens", "64", "--epochs", "4", "--json"
    )
    assert code == 0, said
    assert f"leaves out {path}:41" in said
    assert "teach little" not in said
    facts: dict[str, Any] = json.loads(printed)["fine_tuning"]
    assert (facts["sequences"], facts["bad_rows"], facts["held_out"]) == (40, 2, 2)
    first, *_, last = facts["held_out_cross_entropy"].values()
    assert last < 0.5 * first
    assert json.loads((tmp_path / "made" / "headrace.json").read_text())["fine_tuning"] == facts
    AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["made", "rows.jsonl"]


@pytest.mark.long
def test_ctrl_c_leaves_a_checkpoint_from_which_the_same_command_continues(tmp_path: Path) -> None:
    path, made = rows(tmp_path, 40), tmp_path / "made"
    command = (*CHAT, str(path), "--to", str(made), "--batch-tokens", "30", "--epochs", "400")
    whole = [sys.executable, "-m", "headrace", "sft", *command]
    with subprocess.Popen(whole, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        try:
            said = ""
            while "update " not in said:
                line = running.stderr.readline()
                assert line, said
                said += line
            running.send_signal(signal.SIGINT)
            rest = running.stderr.read()
        finally:
            running.kill()
    assert running.returncode == 130, rest
    assert f"The checkpoint is in {made}.checkpoints: the same command continues" in rest
    assert not made.exists()
    code, other, _ = sft(*command, "--seed", "1")
    assert code == 2
    assert "other data or settings" in other
    code, again, _ = sft(*CHAT, str(path), "--to", str(made), "--restart")
    assert code == 0, again
    assert "the data makes only 1 updates, which teach little. Lower --batch-tokens" in again
    assert not Path(f"{made}.checkpoints").exists()


@pytest.mark.long
@pytest.mark.stack
def test_recorded_episodes_are_learned_by_their_ids(
    exported: dict[str, str], tmp_path: Path
) -> None:
    arguments = (*RECIPE, "--recorded", "--passing", "0", "--to", str(tmp_path / "made"), "--json")
    code, said, printed = sft(*arguments, "--batch-tokens", "2000", environment=exported)
    assert code == 0, said
    facts = json.loads(printed)["fine_tuning"]
    assert facts["namespace"] == "exported"
    assert facts["sequences"] > 20
    assert facts["updates"] > 1


@pytest.mark.long
def test_two_processes_learn_as_one_and_leave_nothing(tmp_path: Path) -> None:
    path = rows(tmp_path, 40)
    digests = []
    for name, processes in (("one", 1), ("two", 2), ("again", 2)):
        code, said, _ = sft(
            *CHAT, str(path), "--to", str(tmp_path / name), "--batch-tokens", "100",
            "--set", f"policies.default.training.processes={processes}",
            environment={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert code == 0, said
        digests.append(weights_digest(tmp_path / name / "model.safetensors"))
    assert digests[1] == digests[2]
    values = [
        [facts["cross_entropy"], *facts["held_out_cross_entropy"].values()]
        for name in ("one", "two")
        for facts in [json.loads((tmp_path / name / "headrace.json").read_text())["fine_tuning"]]
    ]
    assert values[0] == pytest.approx(values[1], abs=1e-3)
