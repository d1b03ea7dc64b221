"""The page of an episode: turns as a tree, requests and answers, and a timeline."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.events import EpisodeEnded, EpisodeStarted, Turn
from headrace.services.base.texts import encodable
from headrace.services.log.unpacked import floats_in, versions_in
from headrace.services.operate.dashboard.index.index_rows import TaskRow
from headrace.services.operate.dashboard.index.tool_calls_read import calls_in
from headrace.services.operate.dashboard.index.version_series import number
from headrace.services.operate.dashboard.views.cut_texts import (
    INLINE,
    Tree,
    artifact_tree,
    failure_tree,
    text_tree,
)
from headrace.services.operate.dashboard.views.exchange_trees import (
    add_answer,
    add_request,
    hop_tree,
)
from headrace.services.operate.show.task_story import (
    AttemptStory,
    EpisodeStory,
    Exchange,
    TaskStory,
)

MOST_TURNS = 500
MOST_EXCHANGES = 1_000

TextOf = Callable[[str, bytes, str], str | None]
"""Decodes token ids, given their policy and the digest of their tokenizer. None if this machine
does not have the tokenizer."""


@dataclass
class EpisodePage:
    """What the page of one attempt is made of."""

    row: TaskRow
    story: TaskStory
    sample: int
    text_of: TextOf
    remarks: list[str] = field(default_factory=list)

    def tree(self, wanted: int | None, first_turn: int = 0) -> Tree:
        """Returns the page of attempt `wanted`, by default the one that counts.

        Raises UsageError if the episode has no such attempt.
        """
        episode = next((one for one in self.story.episodes if one.sample == self.sample), None)
        known = self.row.samples.get(self.sample)
        if episode is None or known is None:
            raise UsageError(f"task {self.row.task} has no sample {self.sample}")
        attempt = self._attempt(episode, wanted)
        outcome = None if episode.outcome is None else episode.outcome.event
        started = None if episode.started is None else episode.started.event
        trajectory = attempt.trajectory.event if attempt.trajectory is not None else None
        exchanges = [self._exchange(one, attempt) for one in attempt.exchanges[:MOST_EXCHANGES]]
        if len(attempt.exchanges) > MOST_EXCHANGES:
            left = len(attempt.exchanges) - MOST_EXCHANGES
            self.remarks.append(f"{left:,} exchanges are left out")
        files = outcome.artifacts if outcome is not None else ()
        return {
            "task": self.row.task,
            "sample": self.sample,
            "attempt": attempt.attempt,
            "attempts": [self._attempt_row(episode, one) for one in episode.attempts],
            "item_id": encodable(self.row.item),
            "purpose": self.row.purpose,
            **_started_tree(started),
            "state": known.state,
            "started_at": known.started_at or None,
            "ended_at": known.ended_at or None,
            "seconds": known.seconds,
            "ending": known.ending,
            "reward": known.reward,
            **_outcome_tree(outcome),
            "metrics": dict(trajectory.metrics) if trajectory is not None else {},
            "artifacts": [artifact_tree(one, self.row.task, self.sample) for one in files],
            "turns": self._turns(attempt, first_turn),
            "turns_total": len(trajectory.turns) if trajectory is not None else 0,
            "exchanges": exchanges,
            "timeline": [
                hop for one in attempt.exchanges[:MOST_EXCHANGES] if (hop := hop_tree(one))
            ],
            "judges": [one for one in exchanges if one["kind"] == "score"],
            "group": group_trees(self.story, self.row),
            "trained_in": known.trained or {},
            "neighbours": self._neighbours(),
            "remarks": [*self.story.remarks, *self.remarks],
        }

    def _attempt(self, episode: EpisodeStory, wanted: int | None) -> AttemptStory:
        found = {one.attempt: one for one in episode.attempts}
        if wanted is None:
            counting = episode.counting
            chosen = counting.event.attempt if counting is not None else max(found, default=0)
            return found.get(chosen, AttemptStory(chosen))
        if wanted not in found:
            raise UsageError(
                f"episode {self.row.task}/{self.sample} has no attempt {wanted} in the log; it has "
                f"{', '.join(map(str, found)) or 'no attempt yet'}"
            )
        return found[wanted]

    def _attempt_row(self, episode: EpisodeStory, attempt: AttemptStory) -> Tree:
        fact, counting = attempt.trajectory, episode.counting
        return {
            "attempt": attempt.attempt,
            "counts": fact is not None and counting is not None and fact.ref == counting.ref,
            "ending": fact.event.ending if fact is not None else "",
            "at": fact.recorded_at if fact is not None else None,
            "exchanges": len(attempt.exchanges),
            "failures": [
                failure_tree(one) for one in (fact.event.failures if fact is not None else ())
            ],
        }

    def _turns(self, attempt: AttemptStory, first: int) -> list[Tree]:
        fact = attempt.trajectory
        if fact is None:
            return []
        turns = fact.event.turns
        if first + MOST_TURNS < len(turns):
            self.remarks.append(
                f"{len(turns) - first - MOST_TURNS:,} turns are left out: first_turn="
                f"{first + MOST_TURNS} shows them"
            )
        advantages = self._advantages(turns)
        samplings = [
            one.model_dump(exclude={"stop_ids", "allowed"}) for one in fact.event.samplings
        ]
        trees = []
        for index in range(first, min(len(turns), first + MOST_TURNS)):
            turn = turns[index]
            context = self.text_of(turn.policy, turn.context, fact.event.tokenizer)
            known = 0 <= turn.sampling < len(samplings)
            trees.append(
                {
                    "index": index,
                    "context": text_tree(context, fact.location, f"turns.{index}.context"),
                    "text": text_tree(turn.text, fact.location, f"turns.{index}.text"),
                    "sampling": samplings[turn.sampling] if known else None,
                    "advantages": advantages[index],
                    **_turn_tree(turn),
                }
            )
        return trees

    def _advantages(self, turns: Sequence[Turn]) -> list[dict[str, float]]:
        """Returns each turn's advantage by policy."""
        found: list[dict[str, float]] = [{} for _ in turns]
        for one in self.story.policies:
            group = one.group.event if one.group is not None else None
            own = [index for index, turn in enumerate(turns) if turn.policy == one.policy]
            for scored in group.samples if group is not None else ():
                values = floats_in(scored.advantages) if scored.sample == self.sample else []
                for order, index in enumerate(own):
                    if values and len(values) in (1, len(own)):
                        found[index][one.policy] = values[order if len(values) > 1 else 0]
        return found

    def _exchange(self, exchange: Exchange, attempt: AttemptStory) -> Tree:
        request, answer = exchange.request, exchange.answer
        tree: Tree = {
            "call": exchange.call,
            "kind": "generate",
            "what": "",
            "request": None,
            "answer": None,
            "requested_at": request.recorded_at if request is not None else None,
            "answered_at": answer.recorded_at if answer is not None else None,
            "queue_s": None,
            "run_s": None,
            "worker": answer.writer if answer is not None else "",
            "index": None,
            "turn": _turn_of(exchange.call, attempt),
            "request_location": request.location if request is not None else "",
            "answer_location": answer.location if answer is not None else "",
        }
        if request is not None:
            add_request(tree, request.event, request.location)
        if answer is not None:
            add_answer(tree, answer.event, answer.location, (self.row.task, self.sample))
        return tree

    def _neighbours(self) -> Tree:
        samples = sorted(self.row.samples)
        at = samples.index(self.sample)
        before = samples[at - 1] if at else None
        after = samples[at + 1] if at + 1 < len(samples) else None
        return {
            name: None if one is None else f"{self.row.task}/{one}"
            for name, one in (("previous", before), ("next", after))
        }


def group_trees(story: TaskStory, row: TaskRow) -> list[Tree]:
    """Returns what became of a task for each policy."""
    trees = []
    for one in story.policies:
        group = one.group.event if one.group is not None else None
        if group is None:
            continue
        versions = {
            sample: episode.trained[one.policy]
            for sample, episode in sorted(row.samples.items())
            if episode.trained and one.policy in episode.trained
        }
        version = next(iter(versions.values()), None)
        trees.append(
            {
                "policy": one.policy,
                "verdict": group.verdict,
                "reason": encodable(group.reason),
                "estimator": encodable(group.estimator),
                "mean": group.mean,
                "deviation": group.deviation,
                "excluded": {str(each.sample): encodable(each.reason) for each in group.excluded},
                "batch": None
                if version is None
                else {"version": version, "trained": list(versions), "dropped": {}},
            }
        )
    return trees


def _started_tree(started: EpisodeStarted | None) -> Tree:
    submitted = started.submitted if started is not None else None
    environment = submitted.environment if submitted is not None else None
    return {
        "agent": encodable(submitted.agent) if submitted is not None else "",
        "environment": encodable(environment.use) if environment is not None else "",
        "verdict": failure_tree(started.verdict if started is not None else None),
    }


def _outcome_tree(outcome: EpisodeEnded | None) -> Tree:
    if outcome is None:
        failure = failure_tree(None)
        return {"rewards": {}, "failure": failure, "masked": False, "policies": [], "labels": {}}
    return {
        "rewards": dict(outcome.rewards),
        "failure": failure_tree(outcome.failure),
        "masked": outcome.masked,
        "policies": [
            one.model_dump(include={"policy", "role", "tokens", "oldest_version"})
            for one in outcome.policies
        ],
        "labels": dict(outcome.labels),
    }


def _turn_tree(turn: Turn) -> Tree:
    logprobs = [one for one in floats_in(turn.logprobs) if one == one]
    return {
        "parent": turn.parent,
        "call": encodable(turn.call),
        "policy": turn.policy,
        "role": encodable(turn.role),
        "context_tokens": len(turn.context) // 4,
        "tokens": len(turn.tokens) // 4,
        "versions": versions_in(turn.versions),
        "logprob_mean": number(sum(logprobs) / len(logprobs)) if logprobs else None,
        "finish": turn.finish,
        "reward": turn.reward,
        "trainable": turn.trainable,
        "demonstrated": turn.demonstrated,
        "kv": turn.kv,
        "teacher": bool(turn.teacher),
        "tool_calls": [
            {"name": encodable(call.name[:200]), "arguments": _json(call.arguments)}
            for call in calls_in(turn.text)
        ],
    }


def _json(value: Any) -> str:
    return encodable(json.dumps(value, ensure_ascii=False))[:INLINE]


def _turn_of(call: str, attempt: AttemptStory) -> int | None:
    turns = attempt.trajectory.event.turns if attempt.trajectory is not None else ()
    return next((index for index, turn in enumerate(turns) if turn.call == call), None)
