"""The batches that the kit feeds to a trainer. The same ones each time."""

from __future__ import annotations

import math
from random import Random

from headrace.schemas.events import (
    BatchAssembled,
    BatchSample,
    Ref,
    Sampling,
    TrajectoryRecorded,
    Turn,
)
from headrace.schemas.packed import pack_f32, pack_i32, pack_spans
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.event_log import EventLog

GROUPS, SAMPLES, TURNS = 2, 4, 2
CONTEXT, TOKENS = 4, 6
"""Tokens that are added to a turn's context, and that the policy samples."""


async def write_batch(
    log: EventLog, recipe: Recipe, policy: str, version: int, vocabulary: int, *, poison: bool
) -> Ref:
    """Writes the trajectories of a batch and then the batch, and returns where that is.

    All groups are of tasks that do not exist. If it is `poison`, its advantages are infinite.
    """
    random = Random(version)
    samples = []
    for number in range(GROUPS * SAMPLES):
        task, sample = (version - 1) * GROUPS + number // SAMPLES, number % SAMPLES
        reward = float(sample % 2)
        advantage = math.inf if poison else (1.0 if reward else -1.0)
        trajectory = _trajectory(policy, version, task, sample, reward, vocabulary, random)
        samples.append(
            BatchSample(
                task=task,
                sample=sample,
                trajectory=await log.send(trajectory),
                advantages=pack_f32([advantage]),
                tokens=TURNS * TOKENS,
                longest=TURNS * (CONTEXT + TOKENS),
                oldest_version=version - 1,
            )
        )
    return await log.send(
        BatchAssembled(
            policy=policy,
            version=version,
            recipe=recipe.digest,
            seed=version,
            samples=tuple(samples),
            sampled_tokens=GROUPS * SAMPLES * TURNS * TOKENS,
            reward_mean=0.5,
            low_mark=version * GROUPS,
            groups_read=version * GROUPS,
        )
    )


def _trajectory(
    policy: str,
    version: int,
    task: int,
    sample: int,
    reward: float,
    vocabulary: int,
    random: Random,
) -> TrajectoryRecorded:
    turns = tuple(
        Turn(
            parent=index - 1,
            call=str(index),
            policy=policy,
            context=pack_i32([random.randrange(vocabulary) for _ in range(CONTEXT)]),
            tokens=pack_i32([random.randrange(vocabulary) for _ in range(TOKENS)]),
            # A policy that knows nothing yet gives each token the same chance.
            logprobs=pack_f32([-math.log(vocabulary)] * TOKENS),
            versions=pack_spans([version - 1] * TOKENS),
        )
        for index in range(TURNS)
    )
    return TrajectoryRecorded(
        task=task,
        sample=sample,
        source="conformance",
        task_id=str(task),
        item_id="conformance",
        agent="default",
        samplings=(Sampling(max_tokens=TOKENS),),
        turns=turns,
        reward=reward,
        ending="finished",
        started=0,
        ended=1,
    )
