"""An episode with a branch and a demonstration, as ATIF."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.schemas.events import TrajectoryRecorded, Turn
from headrace.schemas.packed import pack_f32, pack_i32
from headrace.services.operate.trajectories.atif import AtifWriter, to_atif
from headrace.services.operate.trajectories.recorded_episodes import (
    RecordedEpisode,
    UnpackedTurn,
)


def a_turn(
    number: int, parent: int, prompt_tokens: int, *, demonstrated: bool = False
) -> UnpackedTurn:
    logprobs = [] if demonstrated else [-0.5, -0.25]
    turn = Turn(
        parent=parent,
        call=str(number),
        policy="default",
        context=pack_i32([1, 2, 3]),
        tokens=pack_i32([7, 8]),
        logprobs=pack_f32(logprobs),
        demonstrated=demonstrated,
        finish="stop",
    )
    versions = [] if demonstrated else [4, 5]
    texts = (f"context {number}", f"answer {number}")
    return UnpackedTurn(turn, [1, 2, 3], [7, 8], logprobs, versions, *texts, prompt_tokens)


def an_episode() -> RecordedEpisode:
    """Turn 0 is demonstrated, and turns 1 and 2 both continue it."""
    turns = (a_turn(0, -1, 3, demonstrated=True), a_turn(1, 0, 8), a_turn(2, 0, 8))
    recorded = TrajectoryRecorded(
        task=17,
        sample=3,
        source="train",
        task_id="a",
        item_id="a",
        agent="default",
        turns=tuple(one.turn for one in turns),
        reward=0.5,
        ending="finished",
        started=1_000,
        ended=2_000,
    )
    return RecordedEpisode("exp", recorded, turns, ())


def test_each_path_is_a_trajectory() -> None:
    episode = an_episode()
    found = [to_atif(episode, path) for path in episode.paths()]
    assert [one["trajectory_id"] for one in found] == ["exp/17/3/1", "exp/17/3/2"]
    for one, last in zip(found, (1, 2), strict=True):
        messages = [step["message"] for step in one["steps"]]
        assert messages == ["context 0", "answer 0", f"answer {last}"]
        assert [step["step_id"] for step in one["steps"]] == [1, 2, 3]
        _, demonstrated, sampled = one["steps"]
        assert demonstrated["llm_call_count"] == 0
        assert "metrics" not in demonstrated
        assert demonstrated["observation"]["results"] == [{"content": f"context {last}"}]
        assert sampled["metrics"]["logprobs"] == [-0.5, -0.25]
        assert sampled["model_name"] == "default@5"
        assert one["final_metrics"]["total_prompt_tokens"] == 11


def test_a_second_export_writes_the_same_files(tmp_path: Path) -> None:
    for _ in range(2):
        AtifWriter(tmp_path).write(an_episode())
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["exp-17-3-1.json", "exp-17-3-2.json"]
    assert json.loads((tmp_path / files[0]).read_text())["schema_version"] == "ATIF-v1.7"
