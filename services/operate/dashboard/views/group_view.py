"""The page of a group: the samples of a task side by side."""

from __future__ import annotations

from headrace.services.base.texts import encodable
from headrace.services.log.unpacked import floats_in
from headrace.services.operate.dashboard.index.index_rows import TaskRow
from headrace.services.operate.dashboard.views.cut_texts import (
    Tree,
    artifact_tree,
    failure_tree,
    text_tree,
)
from headrace.services.operate.dashboard.views.episode_view import group_trees
from headrace.services.operate.show.task_story import EpisodeStory, TaskStory

LAST_TEXT = 400
"""Characters of the last text of an episode that the group shows."""
MOST_SAMPLES = 500


def group_tree(row: TaskRow, story: TaskStory, remarks: list[str]) -> Tree:
    """Returns the page of a task."""
    started = next((one.started for one in story.episodes if one.started is not None), None)
    submitted = started.event.submitted if started is not None else None
    location, field = (started.location, "submitted.payload") if started is not None else ("", "")
    if story.submitted is not None:
        submitted = story.submitted.event
        location, field = story.submitted.location, "payload"
    episodes = {one.sample: one for one in story.episodes}
    if len(row.samples) > MOST_SAMPLES:
        remarks.append(f"{len(row.samples) - MOST_SAMPLES:,} samples are left out")
    task: Tree = {}
    if submitted is not None:
        task = {
            "source": encodable(submitted.source),
            "task_id": encodable(submitted.task_id),
            "epoch": submitted.epoch,
            "tenant": encodable(submitted.tenant),
            "agent": encodable(submitted.agent),
            "environment": encodable(submitted.environment.use) if submitted.environment else "",
            "labels": {encodable(name): encodable(text) for name, text in submitted.labels.items()},
            "payload": text_tree(submitted.payload, location, field),
            "artifacts": [artifact_tree(one, row.task, None) for one in submitted.artifacts],
            "samples_wanted": submitted.samples,
        }
    running = any(one.started_at for one in row.samples.values())
    result = story.result
    return {
        "task": row.task,
        "item_id": encodable(row.item),
        "purpose": row.purpose,
        **task,
        "submitted_at": row.submitted_at or None,
        "ended_at": row.ended_at or None,
        "state": "ended" if row.ended_at else "running" if running else "waiting",
        "closed_by": result.event.closed_by if result is not None else "",
        "policies": group_trees(story, row),
        "samples": [
            _sample_tree(row, sample, episodes.get(sample), story)
            for sample in sorted(row.samples)[:MOST_SAMPLES]
        ],
        "remarks": [*story.remarks, *remarks],
    }


def _sample_tree(row: TaskRow, sample: int, episode: EpisodeStory | None, story: TaskStory) -> Tree:
    known = row.samples[sample]
    attempt = known.attempt
    outcome = episode.outcome.event if episode is not None and episode.outcome else None
    counting = episode.counting if episode is not None else None
    turns = counting.event.turns if counting is not None else ()
    advantages = {
        one.policy: floats_in(scored.advantages)
        for one in story.policies
        if one.group is not None
        for scored in one.group.event.samples
        if scored.sample == sample
    }
    return {
        "sample": sample,
        "state": known.state,
        "ending": known.ending,
        "reward": known.reward,
        "rewards": dict(outcome.rewards) if outcome is not None else {},
        "attempts": known.attempts or len(known.by_attempt),
        "seconds": known.seconds,
        "tokens": attempt.tokens if attempt is not None else 0,
        "turns": attempt.turns if attempt is not None else 0,
        "oldest_version": known.oldest,
        "advantages": advantages,
        "failure": failure_tree(outcome.failure if outcome is not None else None),
        "last_text": encodable(turns[-1].text[-LAST_TEXT:]) if turns else "",
        "trained_in": known.trained or {},
        "tool_failures": known.tool_failures,
    }
