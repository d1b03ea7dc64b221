"""Writes the records of a run that nobody played: all topics that the dashboard reads."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headrace.schemas.events import (
    ActionRequested,
    BatchAssembled,
    BatchSample,
    Blob,
    EnvironmentUse,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    Failure,
    GenerationCompleted,
    GenerationRequested,
    GroupClosed,
    GroupSample,
    ObservationRecorded,
    PolicyPublished,
    PolicyUse,
    Ref,
    Sampling,
    TaskEnded,
    TaskSubmitted,
    TrajectoryRecorded,
    Turn,
    Use,
)
from headrace.schemas.packed import pack_f32, pack_i32, pack_spans

Send = Callable[[Event], Awaitable[Ref]]
"""Writes an event, and returns where it is."""
DIGEST = bytes(16)
SAMPLING = Sampling(max_tokens=1_000)
ENVIRONMENT = EnvironmentUse(use="default")
TOOLS = ("search", "read")
IN_FLIGHT = 32
"""Tasks that are written at the same time."""


@dataclass(frozen=True)
class Size:
    """How large the run is."""

    tasks: int = 8
    samples: int = 4
    turns: int = 3
    tokens: int = 10
    """Sampled tokens of a turn."""
    groups: int = 2
    """Groups of a batch."""
    broken: int | None = None
    """From this version on, `search` always fails, and of a group only sample 0 has a reward."""


class RunWriter:
    """Writes a run of one policy, task by task, and a batch and a version for some tasks."""

    def __init__(
        self,
        send: Send,
        size: Size,
        seed: int = 0,
        observation: str = "ok",
        weights: Blob | None = None,
    ) -> None:
        """`observation` is what the environment answers. `weights` are those of all versions; None:
        they are not in the blob store."""
        self._send = send
        self._size = size
        self._seed = seed
        self._observation = observation
        self._weights = weights or Blob(sha256=bytes(32), size=0)
        source = random.Random(seed)
        self._tokens = pack_i32([source.randrange(256) for _ in range(size.tokens)])
        self._logprobs = pack_f32(-source.random() for _ in range(size.tokens))

    async def write(self) -> None:
        """Writes everything."""
        await self._publish(0)
        size = self._size
        for version, first in enumerate(range(0, size.tasks, size.groups), 1):
            numbers = range(first, min(size.tasks, first + size.groups))
            refs = [await self._send(self._submitted(number)) for number in numbers]
            turns = asyncio.Semaphore(IN_FLIGHT)
            groups = await asyncio.gather(*(self._task(ref.offset, version, turns) for ref in refs))
            await self._batch(version, [group for group in groups if group.verdict == "scored"])
            await self._publish(version)

    def _submitted(self, number: int) -> TaskSubmitted:
        return TaskSubmitted(
            source="test",
            task_id=str(number),
            item_id=f"item-{number % 5}",
            agent="default",
            environment=ENVIRONMENT,
            roles={"policy": Use(policy="default", sampling=SAMPLING)},
            samples=self._size.samples,
            max_turns=100,
            max_tokens=100_000,
            deadline_s=600,
        )

    async def _task(self, task: int, version: int, turns: asyncio.Semaphore) -> GroupClosed:
        async with turns:
            numbers = range(self._size.samples)
            outcomes = await asyncio.gather(*(self._episode(task, n, version) for n in numbers))
        await self._send(
            TaskEnded(
                task=task,
                source="test",
                task_id=str(task),
                item_id=f"item-{task % 5}",
                closed_by="all",
                outcomes=tuple(outcomes),
            )
        )
        rewards = [one.reward for one in outcomes if one.reward is not None]
        equal = len(set(rewards)) < 2
        group = GroupClosed(
            task=task,
            policy="default",
            item_id=f"item-{task % 5}",
            verdict="dropped" if equal else "scored",
            reason="zero_advantage" if equal else "",
            estimator="grpo",
            samples=()
            if equal
            else tuple(
                GroupSample(
                    sample=one.sample,
                    trajectory=one.trajectory,
                    reward=one.reward,
                    advantages=pack_f32([one.reward - 0.5]),
                    tokens=self._size.tokens,
                    longest=self._size.tokens,
                    oldest_version=version - 1,
                )
                for one in outcomes
                if one.trajectory is not None and one.reward is not None
            ),
        )
        await self._send(group)
        return group

    def _is_broken(self, version: int) -> bool:
        return self._size.broken is not None and version >= self._size.broken

    async def _episode(self, task: int, sample: int, version: int) -> EpisodeEnded:
        source = random.Random(f"{self._seed}/{task}/{sample}")
        await self._send(
            EpisodeStarted(
                task=task, sample=sample, submitted=self._submitted(task), seed=0, deadline=2**40
            )
        )
        turns = [
            await self._turn(task, sample, n, version, source) for n in range(self._size.turns)
        ]
        now = int(time.time() * 1000)
        reward = float(sample == 0 if self._is_broken(version) else source.random() < 0.5)
        failed = source.random() < 0.05
        trajectory = await self._send(
            TrajectoryRecorded(
                task=task,
                sample=sample,
                source="test",
                task_id=str(task),
                item_id=f"item-{task % 5}",
                agent="default",
                environment="default",
                samplings=(SAMPLING,),
                turns=tuple(turns),
                reward=None if failed else reward,
                ending="failed" if failed else "finished",
                started=now,
                ended=now,
            )
        )
        used = self._size.tokens * self._size.turns
        use = PolicyUse(policy="default", tokens=used, longest=used, oldest_version=version - 1)
        outcome = EpisodeEnded(
            task=task,
            sample=sample,
            item_id=f"item-{task % 5}",
            ending="failed" if failed else "finished",
            failure=Failure(origin="environment", code="broken", message="it broke")
            if failed
            else None,
            trajectory=trajectory,
            reward=None if failed else reward,
            policies=(use,),
            seconds=1.5,
        )
        await self._send(outcome)
        return outcome

    async def _turn(
        self, task: int, sample: int, number: int, version: int, source: random.Random
    ) -> Turn:
        call, step = str(2 * number + 1), str(2 * number + 2)
        tool = source.choice(TOOLS)
        calls = json.dumps({"name": tool, "arguments": {"q": number}})
        text = f"I look it up. <tool_call>{calls}</tool_call>"
        request = GenerationRequested(
            task=task, sample=sample, call=call, policy="default", text="next", sampling=SAMPLING,
            expires_at=2**40, digest=DIGEST,
        )  # fmt: skip
        await self._send(request)
        versions = pack_spans([version - 1] * self._size.tokens)
        answer = GenerationCompleted(
            task=task, sample=sample, call=call, digest=DIGEST, policy="default", worker="w",
            finish="stop", prompt_added=pack_i32([97]), tokens=self._tokens, text=text,
            logprobs=self._logprobs, versions=versions, queue_ms=5, run_ms=20,
        )  # fmt: skip
        await self._send(answer)
        action = ActionRequested(
            task=task, sample=sample, call=step, index=number + 1, kind="step",
            environment=ENVIRONMENT, payload=json.dumps({"action": text}), expires_at=2**40,
            digest=DIGEST,
        )  # fmt: skip
        await self._send(action)
        bad = tool == "search" and source.random() < (1.0 if self._is_broken(version) else 0.3)
        observation = ObservationRecorded(
            task=task, sample=sample, call=step, index=number + 1, digest=DIGEST, run_ms=10,
            text="Error: not found" if bad else self._observation,
        )  # fmt: skip
        await self._send(observation)
        return Turn(
            parent=number - 1, call=call, policy="default", context=pack_i32([97]),
            tokens=self._tokens, logprobs=self._logprobs, versions=versions, finish="stop",
            text=text,
        )  # fmt: skip

    async def _batch(self, version: int, groups: list[GroupClosed]) -> None:
        samples = [
            BatchSample(
                task=group.task,
                sample=one.sample,
                trajectory=one.trajectory,
                advantages=one.advantages,
                tokens=one.tokens,
                longest=one.longest,
                oldest_version=one.oldest_version,
            )
            for group in groups
            for one in group.samples
        ]
        rewards = [one.reward for group in groups for one in group.samples]
        await self._send(
            BatchAssembled(
                policy="default",
                version=version,
                recipe=bytes(32),
                seed=0,
                samples=tuple(samples),
                sampled_tokens=sum(one.tokens for one in samples),
                reward_mean=sum(rewards) / len(rewards) if rewards else None,
                low_mark=0,
                groups_read=0,
            )
        )

    async def _publish(self, version: int) -> None:
        await self._send(
            PolicyPublished(
                policy="default",
                version=version,
                status="trained" if version else "initial",
                digest=bytes(32),
                full=self._weights,
                full_version=version,
                metrics={"loss": 1.0 / (version + 1)},
            )
        )
