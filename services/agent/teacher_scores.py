"""Asks the teacher of a policy for its logprobs of the tokens that the policy sampled.

This happens once, after the end of an episode that may be trained on: a teacher reads each sequence
once, and not again after every turn. The requests follow from the turns alone. So after a crash the
next owner of the episode makes the same ones, and finds the answers that are recorded already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.schemas import packed
from headrace.schemas.events import (
    EpisodeStarted,
    Failure,
    GenerationCompleted,
    GenerationRequested,
    Sampling,
    ScoredTokens,
    Turn,
)
from headrace.schemas.turn_paths import paths
from headrace.services.agent.attempt import Attempt
from headrace.services.agent.requests import meaning_of
from headrace.services.agent.stops import AttemptFailed
from headrace.services.agent.turns import RecordedTurn, arrange
from headrace.services.base.clock import now


@dataclass(frozen=True, slots=True)
class Teacher:
    """The teacher of a policy."""

    policy: str
    """Its name in the recipe."""
    answer_s: float
    """Most seconds that an episode waits for it."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A sequence that a teacher reads, and the turns in it that it scores."""

    teacher: Teacher
    tokens: bytes
    """i32[]: the sequence, up to the last token that is scored."""
    scored: tuple[ScoredTokens, ...]
    """One for each turn."""
    samplings: tuple[Sampling, ...]
    turns: tuple[str, ...]
    """The call paths of the turns."""
    last: str
    """The call path of the last turn of the sequence."""

    def request(self, started: EpisodeStarted, attempt: int, number: int) -> GenerationRequested:
        """Returns the request for the scores, which is the same one again if it is made again.

        `number` counts the tries from 0.
        """
        parts = (one.model_dump_json() for one in (*self.scored, *self.samplings))
        return GenerationRequested(
            task=started.task,
            sample=started.sample,
            attempt=attempt,
            call=f"{self.last}.score{number}",
            policy=self.teacher.policy,
            kind="score",
            tokens=self.tokens,
            scored=self.scored,
            samplings=self.samplings,
            sampling=self.samplings[0],
            priority=started.submitted.priority,
            expires_at=int((now() + self.teacher.answer_s) * 1000),
            digest=meaning_of("score", self.teacher.policy, self.tokens, *parts),
        )


def sequences_to_score(
    recorded: Mapping[str, RecordedTurn], teachers: Mapping[str, Teacher]
) -> list[Scored]:
    """Returns what the teachers must read. `teachers` maps a policy's name to its teacher.

    A turn that several sequences share is scored in the first of them only.
    """
    turns, samplings = arrange(recorded)
    known: set[int] = set()
    found = []
    for path in paths(turns):
        policy = turns[path[-1]].policy
        new = [
            index
            for index in path
            if index not in known and turns[index].policy == policy and _is_learned(turns[index])
        ]
        if policy in teachers and new:
            found.append(_scored(teachers[policy], turns, samplings, path, new))
            known.update(new)
    return found


def _is_learned(turn: Turn) -> bool:
    return turn.trainable and not turn.demonstrated and bool(turn.tokens)


def _scored(
    teacher: Teacher,
    turns: Sequence[Turn],
    samplings: Sequence[Sampling],
    path: Sequence[int],
    new: Sequence[int],
) -> Scored:
    tokens, length = bytearray(), 0
    scored: list[ScoredTokens] = []
    used: list[Sampling] = []
    for index in path[: path.index(new[-1]) + 1]:
        turn = turns[index]
        first = length + packed.count(turn.context)
        count = packed.count(turn.tokens)
        tokens += turn.context + turn.tokens
        length = first + count
        if index in new:
            # Limits and seeds differ from turn to turn, but change no logprob.
            sampling = samplings[turn.sampling].model_copy(update={"max_tokens": 1, "seed": None})
            if sampling not in used:
                used.append(sampling)
            number = used.index(sampling)
            scored.append(ScoredTokens(first=first, count=count, sampling=number))
    calls = tuple(turns[index].call for index in new)
    last = turns[path[-1]].call
    return Scored(teacher, bytes(tokens), tuple(scored), tuple(used), calls, last)


async def ask_teachers(
    attempt: Attempt, recorded: Mapping[str, RecordedTurn], teachers: Mapping[str, Teacher]
) -> dict[str, bytes]:
    """Returns the teachers' logprobs, f32[], of each turn that they score, by its call path.

    Raises AttemptFailed, which can't be retried, if a teacher does not answer or can't score.
    """
    asked = [
        asyncio.create_task(_ask(attempt, one)) for one in sequences_to_score(recorded, teachers)
    ]
    try:
        found = await asyncio.gather(*asked)
    finally:
        for task in asked:
            task.cancel()
    return {call: logprobs for one in found for call, logprobs in one.items()}


async def _ask(attempt: Attempt, scored: Scored) -> dict[str, bytes]:
    teacher = scored.teacher
    tries = attempt.started.submitted.attempts
    try:
        async with asyncio.timeout(teacher.answer_s):
            for number in range(tries):
                request = scored.request(attempt.started, attempt.attempt, number)
                answer = await attempt.ask_teacher(request)
                again = answer.failure is not None and answer.failure.origin == "infrastructure"
                if not again or number + 1 == tries:
                    break
    except TimeoutError:
        message = f"the teacher {teacher.policy!r} did not answer within {teacher.answer_s:g} s"
        raise _failed("teacher_silent", message) from None
    return _by_turn(scored, answer)


def _by_turn(scored: Scored, answer: GenerationCompleted) -> dict[str, bytes]:
    """Divides the logprobs of an answer among the turns."""
    name = f"the teacher {scored.teacher.policy!r}"
    if answer.failure is not None:
        failure = answer.failure
        message = f"{name} could not score the episode: {failure.code}: {failure.message}"
        raise _failed("teacher_failed", message)
    if answer.finish == "overflow":
        length = packed.count(scored.tokens)
        message = f"a sequence of {length} tokens does not fit into the context of {name}"
        raise _failed("teacher_overflow", message)
    logprobs = packed.unpack_f32(answer.logprobs)
    if len(logprobs) != sum(one.count for one in scored.scored):
        message = f"{name} answered with {len(logprobs)} logprobs, which are not those asked for"
        raise _failed("teacher_failed", message)
    found, start = {}, 0
    for call, one in zip(scored.turns, scored.scored, strict=True):
        found[call] = packed.pack_f32(logprobs[start : start + one.count])
        start += one.count
    return found


def _failed(code: str, message: str) -> AttemptFailed:
    return AttemptFailed(Failure(origin="infrastructure", code=code, message=message))
