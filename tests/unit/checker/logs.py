"""A small log without fault, to be doctored."""

from __future__ import annotations

import hashlib
from typing import Any

from headrace.schemas.events import (
    ActionRequested,
    BatchAssembled,
    BatchSample,
    Blob,
    Dropped,
    EnvironmentUse,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    GenerationCompleted,
    GenerationRequested,
    GroupClosed,
    GroupSample,
    LoadReported,
    ObservationRecorded,
    PolicyPublished,
    PolicyUse,
    PoolLoad,
    Ref,
    Sampling,
    TaskEnded,
    TaskSubmitted,
    TrajectoryRecorded,
    Turn,
    Use,
)
from headrace.schemas.packed import pack_f32, pack_i32, pack_spans
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import Topics
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery
from headrace.stream_jobs.advantages import grpo

TOPICS = Topics("test", ("default",), 1)
RECIPE = Recipe.model_validate(
    {
        "name": "test",
        "policies": {
            "default": {"model": "tiny-llama", "batches": {"groups": 1, "max_staleness": 1}}
        },
        "environments": {"default": {"use": "null"}},
        "scheduler": {"live_episodes": 2},
    }
)
SAMPLES = 2
TURNS = 2
TOKENS: dict[str, Any] = {
    "tokens": pack_i32([7]),
    "logprobs": pack_f32([-0.5]),
    "versions": pack_spans([0]),
}
ADDED = pack_i32([3])
"""The ids of each prompt's text."""
WEIGHTS: dict[str, Any] = {"full": Blob(sha256=bytes(32), size=1)}
SUBMITTED: dict[str, Any] = {
    "agent": "default",
    "roles": {"policy": Use(policy="default", sampling=Sampling(max_tokens=1))},
    "samples": SAMPLES,
    "max_turns": TURNS,
    "max_tokens": TURNS,
    "deadline_s": 60,
}


class Log:
    """A log under construction: what is written gets a place, and the next second."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery[Event]] = []
        self._ends: dict[str, int] = {}

    def write(self, event: Event) -> Ref:
        """Appends an event."""
        topic = TOPICS.route(event).name
        offset = self._ends.get(topic, 0)
        self._ends[topic] = offset + 1
        digest = hashlib.sha256(repr(event).encode()).digest()[:16]
        ref = Ref(topic=topic, partition=0, offset=offset, digest=digest)
        at_s = float(len(self.deliveries))
        self.deliveries.append(Delivery(event, ref, at_s, Partition(topic, 0), offset))
        return ref

    def change(self, kind: type[Event], **changes: Any) -> None:
        """Changes the last event of a type where it lies, its reference kept."""
        self._change(max(self._places(kind)), changes)

    def change_all(self, kind: type[Event], **changes: Any) -> None:
        """Changes every event of a type where it lies."""
        for at in self._places(kind):
            self._change(at, changes)

    def change_first(self, kind: type[Event], **changes: Any) -> None:
        """Changes the first event of a type where it lies."""
        self._change(min(self._places(kind)), changes)

    def last(self, kind: type[Event]) -> Any:
        """The last event of a type."""
        return self.deliveries[max(self._places(kind))].event

    def again(self, kind: type[Event], **changes: Any) -> None:
        """Writes the last event of a type once more."""
        self.write(self.last(kind).model_copy(update=changes))

    def without(self, kind: type[Event], **fields: Any) -> None:
        """Takes every event of a type, and with such fields, out."""
        self.deliveries = [
            one
            for one in self.deliveries
            if not isinstance(one.event, kind)
            or any(getattr(one.event, name) != value for name, value in fields.items())
        ]

    def without_last(self, kind: type[Event]) -> None:
        """Takes the last event of a type out."""
        del self.deliveries[max(self._places(kind))]

    def date(self, kind: type[Event], at_s: float) -> None:
        """Has the last event of a type recorded at another time."""
        at = max(self._places(kind))
        one = self.deliveries[at]
        self.deliveries[at] = Delivery(one.event, one.ref, at_s, one.partition, one.offset)

    def _places(self, kind: type[Event]) -> list[int]:
        return [n for n, one in enumerate(self.deliveries) if isinstance(one.event, kind)]

    def _change(self, at: int, changes: dict[str, Any]) -> None:
        old = self.deliveries[at]
        event = old.event.model_copy(update=changes)
        self.deliveries[at] = Delivery(event, old.ref, old.recorded_at, old.partition, old.offset)


def whole_log() -> Log:
    """Two tasks of two samples: the first is trained on, the second's group is dropped."""
    log = Log()
    published: dict[str, Any] = {"policy": "default", "digest": bytes(32), **WEIGHTS}
    log.write(PolicyPublished(version=0, status="initial", full_version=0, **published))
    load = PoolLoad(
        policy="default", partitions=pack_i32([0]), slots=1, busy=0, waiting=0, run_ms=0
    )
    log.write(LoadReported(worker="one", number=0, every_ms=1000, pools=(load,)))
    samples = write_group(log, 0, write_task(log, 0, (1.0, 0.0)))
    write_group(log, 1, write_task(log, 1, (1.0, 1.0)), reason="zero_advantage")
    batch = log.write(
        BatchAssembled(
            policy="default",
            version=1,
            recipe=RECIPE.digest,
            seed=0,
            samples=samples,
            dropped=(Dropped(task=1, reason="zero_advantage"),),
            sampled_tokens=SAMPLES * TURNS,
            reward_mean=0.75,
            low_mark=2,
            groups_read=2,
        )
    )
    published |= {"digest": bytes(31) + b"\1", "batch": batch}
    log.write(PolicyPublished(version=1, status="trained", full_version=1, **published))
    return log


def write_group(
    log: Log, task: int, outcomes: tuple[EpisodeEnded, ...], reason: str = ""
) -> tuple[BatchSample, ...]:
    """Closes a task's group: scored, or dropped for a reason. Its samples as a batch has them."""
    rewards = [outcome.reward or 0.0 for outcome in outcomes]
    samples = [
        {
            "sample": outcome.sample,
            "trajectory": outcome.trajectory,
            "advantages": pack_f32([advantage]),
            **{name: getattr(outcome.policies[0], name) for name in _SIZES},
        }
        for outcome, advantage in zip(outcomes, grpo(rewards), strict=True)
    ]
    scored = [
        GroupSample(reward=reward, **one)
        for one, reward in zip(samples, rewards, strict=True)
        if not reason
    ]
    log.write(
        GroupClosed(
            task=task,
            policy="default",
            item_id="0",
            verdict="dropped" if reason else "scored",
            reason=reason,
            estimator="grpo",
            mean=sum(rewards) / len(rewards),
            samples=tuple(scored),
        )
    )
    return tuple(BatchSample(task=task, **one) for one in samples)


_SIZES = ("tokens", "longest", "oldest_version")


def write_task(log: Log, task: int, rewards: tuple[float, ...]) -> tuple[EpisodeEnded, ...]:
    """A task from its submission to its end, with these rewards. Its outcomes."""
    who: dict[str, Any] = {"source": "test", "task_id": str(task), "item_id": "0"}
    submitted = TaskSubmitted(**who, **SUBMITTED)
    log.write(submitted)
    for sample in range(SAMPLES):
        start: dict[str, Any] = {"task": task, "sample": sample, "seed": sample}
        log.write(EpisodeStarted(submitted=submitted, deadline=60_000, **start))
    outcomes = tuple(
        write_episode(log, task, sample, reward) for sample, reward in enumerate(rewards)
    )
    log.write(TaskEnded(task=task, closed_by="all", outcomes=outcomes, **who))
    return outcomes


def write_episode(log: Log, task: int, sample: int, reward: float) -> EpisodeEnded:
    """A reset, then a generation and a step for each turn; the last one earns the reward."""
    episode: dict[str, Any] = {"task": task, "sample": sample}
    turns: list[Turn] = []
    _act(log, episode, 0, None)
    for index in range(TURNS):
        call = str(2 + 2 * index)
        turn = _speak(log, episode, call, turns)
        earned = reward if index == TURNS - 1 else None
        turns.append(turn.model_copy(update={"parent": index - 1, "reward": earned}))
        _act(log, episode, index + 1, earned)
    end: dict[str, Any] = {"ending": "finished", "reward": reward, **episode}
    who: dict[str, Any] = {"source": "test", "task_id": str(task), "item_id": "0"}
    times: dict[str, Any] = {"started": 0, "ended": 1}
    reference = log.write(
        TrajectoryRecorded(agent="default", turns=tuple(turns), **times, **end, **who)
    )
    use = PolicyUse(
        policy="default",
        tokens=TURNS,
        longest=2 * TURNS,
        oldest_version=0,
        turn_rewards=pack_f32([float("nan")] * (TURNS - 1) + [reward]),
    )
    outcome = EpisodeEnded(item_id="0", trajectory=reference, policies=(use,), **end)
    log.write(outcome)
    return outcome


def _act(log: Log, episode: dict[str, Any], index: int, reward: float | None) -> None:
    call = str(1 + 2 * index)
    action: dict[str, Any] = {"call": call, "index": index, "digest": bytes([index] * 16)}
    environment = EnvironmentUse(use="default")
    kind: Any = "step" if index else "reset"
    request = ActionRequested(
        kind=kind, environment=environment, expires_at=60_000, **action, **episode
    )
    log.write(request)
    log.write(ObservationRecorded(reward=reward, **action, **episode))


def _speak(log: Log, episode: dict[str, Any], call: str, turns: list[Turn]) -> Turn:
    """The turn that the policy adds to those before it."""
    before = b"".join(turn.context + turn.tokens for turn in turns)
    asked: dict[str, Any] = {"call": call, "policy": "default", "digest": bytes(16), **episode}
    sampling = Sampling(max_tokens=1)
    log.write(GenerationRequested(tokens=before, sampling=sampling, expires_at=60_000, **asked))
    log.write(GenerationCompleted(worker="w", finish="stop", prompt_added=ADDED, **TOKENS, **asked))
    return Turn(call=call, policy="default", context=ADDED, finish="stop", **TOKENS)
