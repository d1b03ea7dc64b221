"""Writes episodes as a log of Inspect, so that `inspect view` opens them.

Each path of an episode is a sample of the log. Its id is the task, its epoch the sample, and its
messages are the texts of the turns. A path beside the first has the path's last turn in its id.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from inspect_ai.log import (
    EvalConfig,
    EvalDataset,
    EvalLog,
    EvalMetric,
    EvalPlan,
    EvalResults,
    EvalSample,
    EvalScore,
    EvalSpec,
    EvalStats,
    write_eval_log,
)
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageUser,
    ModelOutput,
    ModelUsage,
)
from inspect_ai.scorer import Score

from headrace.errors import UsageError
from headrace.services.models.blobs import disk_errors
from headrace.services.operate.trajectories.recorded_episodes import RecordedEpisode
from headrace.services.operate.trajectories.whole_file import whole_file

SUFFIXES = (".eval", ".json")
SCORER = "reward"


def samples_of(episode: RecordedEpisode) -> list[EvalSample]:
    """Returns a sample for each path of an episode."""
    recorded, found = episode.recorded, []
    for number, path in enumerate(episode.paths()):
        turns = [episode.turns[index] for index in path]
        messages: list[ChatMessage] = []
        for turn in turns:
            if turn.context_text:
                messages.append(ChatMessageUser(content=turn.context_text))
            messages.append(ChatMessageAssistant(content=turn.text, model=turn.model))
        name = str(recorded.task) if number == 0 else f"{recorded.task}/{path[-1]}"
        output = ModelOutput.from_content(turns[-1].model, turns[-1].text)
        output.usage = ModelUsage(
            input_tokens=sum(turn.prompt_tokens for turn in turns),
            output_tokens=sum(len(turn.tokens) for turn in turns),
        )
        scores = {} if recorded.reward is None else {SCORER: Score(value=recorded.reward)}
        found.append(
            EvalSample(
                id=name,
                epoch=recorded.sample + 1,  # Inspect counts from 1.
                uuid=f"{episode.name}/{path[-1]}",
                input=turns[0].context_text,
                target="",
                messages=messages,
                output=output,
                scores=scores,
                metadata={
                    "ending": recorded.ending,
                    "purpose": recorded.purpose,
                    "item_id": recorded.item_id,
                    "labels": recorded.labels,
                    "versions": sorted({one for turn in turns for one in turn.versions}),
                },
                total_time=(recorded.ended - recorded.started) / 1000,
            )
        )
    return found


class InspectWriter:
    """Gathers samples, and writes them as one log."""

    def __init__(self, file: Path, namespace: str) -> None:
        """Raises UsageError if Inspect could not read a file of this name."""
        if file.suffix not in SUFFIXES:
            raise UsageError(f"--to {file}: give a file whose name ends in .eval or .json")
        self._file = file
        self._namespace = namespace
        self._samples: list[EvalSample] = []
        self._began: list[float] = []
        self._ended: list[float] = []

    def write(self, episode: RecordedEpisode) -> None:
        """Adds an episode."""
        self._samples += samples_of(episode)
        self._began.append(episode.recorded.started / 1000)
        self._ended.append(episode.recorded.ended / 1000)

    def close(self) -> None:
        """Writes the log, whole or not at all. Raises DependencyError if the disk can't take it."""
        with disk_errors(f"make {self._file.parent}"):
            self._file.absolute().parent.mkdir(parents=True, exist_ok=True)
        with whole_file(self._file.absolute()) as unfinished:
            write_eval_log(self._log(), str(unfinished))

    def _log(self) -> EvalLog:
        began, ended = (
            datetime.fromtimestamp(at, UTC).isoformat()
            for at in (min(self._began, default=0.0), max(self._ended, default=0.0))
        )
        models = sorted({one.output.model for one in self._samples})
        rewards = [one.scores[SCORER].as_float() for one in self._samples if one.scores]
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        score = EvalScore(
            name=SCORER, scorer=SCORER, metrics={"mean": EvalMetric(name="mean", value=mean)}
        )
        return EvalLog(
            status="success",
            eval=EvalSpec(
                eval_id=self._namespace,
                run_id=self._namespace,
                task=self._namespace,
                task_id=self._namespace,
                created=began,
                dataset=EvalDataset(name=self._namespace, samples=len(self._samples)),
                model=models[-1] if models else "headrace",
                config=EvalConfig(),
            ),
            plan=EvalPlan(),
            results=EvalResults(
                total_samples=len(self._samples),
                completed_samples=len(self._samples),
                scores=[score] if rewards else [],
            ),
            stats=EvalStats(started_at=began, completed_at=ended),
            samples=self._samples,
        )
