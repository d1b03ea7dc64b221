"""Writes episodes in the Agent Trajectory Interchange Format (ATIF), version 1.7, as JSON.

The format is that of Harbor's RFC 0001. It has a list of steps, so each path of an episode from its
first turn to a leaf is a trajectory of its own. An observation is the text that was added to the
context before the next turn.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headrace.services.models.blobs import disk_errors
from headrace.services.operate.trajectories.recorded_episodes import RecordedEpisode, UnpackedTurn
from headrace.services.operate.trajectories.whole_file import whole_file

SCHEMA = "ATIF-v1.7"


def to_atif(episode: RecordedEpisode, path: list[int]) -> dict[str, Any]:
    """Returns one path of an episode as an ATIF trajectory."""
    recorded, turns = episode.recorded, [episode.turns[index] for index in path]
    steps: list[dict[str, Any]] = []
    for turn in turns:
        if not steps:
            began = datetime.fromtimestamp(recorded.started / 1000, UTC)
            steps.append(
                {"source": "user", "message": turn.context_text, "timestamp": began.isoformat()}
            )
        elif turn.context:
            steps[-1]["observation"] = {"results": [{"content": turn.context_text}]}
        steps.append(_agent_step(turn))
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    return {
        "schema_version": SCHEMA,
        "session_id": episode.name,
        "trajectory_id": f"{episode.name}/{path[-1]}",
        "agent": {
            "name": recorded.agent,
            "version": version("headrace"),
            "model_name": turns[-1].model,
        },
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(turn.prompt_tokens for turn in turns),
            "total_completion_tokens": sum(len(turn.tokens) for turn in turns),
            "total_steps": len(steps),
            "extra": {"reward": recorded.reward, "rewards": recorded.rewards, **recorded.metrics},
        },
        "extra": {
            "purpose": recorded.purpose,
            "environment": recorded.environment,
            "source": recorded.source,
            "task_id": recorded.task_id,
            "item_id": recorded.item_id,
            "attempt": recorded.attempt,
            "ending": recorded.ending,
            "labels": recorded.labels,
        },
    }


def _agent_step(turn: UnpackedTurn) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": len(turn.tokens),
        "completion_token_ids": turn.tokens,
        "extra": {"added_prompt_token_ids": turn.context, "versions": turn.versions},
    }
    if turn.logprobs:
        metrics["logprobs"] = turn.logprobs
    facts = turn.turn
    extra: dict[str, Any] = {"call": facts.call, "role": facts.role, "finish": facts.finish}
    extra |= {"reward": facts.reward, "trainable": facts.trainable}
    return {
        "source": "agent",
        "model_name": turn.model,
        "message": turn.text,
        "llm_call_count": 0 if facts.demonstrated else 1,
        **({} if facts.demonstrated else {"metrics": metrics}),
        "extra": extra,
    }


class AtifWriter:
    """Writes a file for each path of each episode into a folder."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder. Raises DependencyError if the disk can't take it."""
        self._folder = folder
        with disk_errors(f"make {folder}"):
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, episode: RecordedEpisode) -> None:
        """Writes an episode. A second export of it writes the same files."""
        task, sample = episode.recorded.task, episode.recorded.sample
        for path in episode.paths():
            file = self._folder / f"{episode.namespace}-{task}-{sample}-{path[-1]}.json"
            text = json.dumps(to_atif(episode, path), ensure_ascii=False, indent=1)
            with whole_file(file) as unfinished:
                unfinished.write_text(text, "utf-8")

    def close(self) -> None:
        """Does nothing: the files are written."""
