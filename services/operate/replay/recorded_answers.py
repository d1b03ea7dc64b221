"""Runs an agent's code against the recorded answers of one attempt, to see if it asks the same.

There is no environment and no model, and nothing is sent. The agent's coroutine runs as it does
after a crash. The first thing that it does differently is its divergence.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headrace.schemas.events import (
    ActionRequested,
    Ending,
    EpisodeEnded,
    EpisodeStarted,
    GenerationCompleted,
    GenerationRequested,
    ObservationRecorded,
)
from headrace.services.agent.episode import Episode
from headrace.services.agent.records import (
    COUNTED,
    UNREWARDED,
    AgentSetup,
    earned_reward,
    outcome_of,
)
from headrace.services.agent.requests import Answer, Request
from headrace.services.agent.stops import EpisodeStopped, error_of, exits_contained
from headrace.services.operate.readable import readable

A = TypeVar("A", GenerationCompleted, ObservationRecorded)
END = "end"
"""The call of a divergence that shows only after the agent has ended."""
AGENT_S = 30.0
"""Most seconds that an agent may run. All of its requests are answered at once."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first thing that an agent does differently in an attempt."""

    task: int
    sample: int
    attempt: int
    call: str
    """The path of the request, or `end`."""
    then: dict[str, Any]
    now: dict[str, Any]


@dataclass
class RecordedAttempt:
    """What the log has of an episode's attempt that counts, or else of its last attempt."""

    started: EpisodeStarted
    attempt: int = 0
    requests: dict[str, Request] = field(default_factory=dict)
    """The agent's own, by call."""
    answers: dict[str, Answer] = field(default_factory=dict)
    outcome: EpisodeEnded | None = None
    """None if the episode has not ended."""

    def add(self, event: EpisodeEnded | Request | Answer) -> None:
        """Adds the outcome, which must come first, or a request or an answer of any attempt.

        If two events have the same id, the first one counts.
        """
        if isinstance(event, EpisodeEnded):
            if self.outcome is None:
                self.outcome, self.attempt = event, event.attempt
            return
        if self.outcome is None and event.attempt > self.attempt:
            self.attempt = event.attempt
            self.requests.clear()
            self.answers.clear()
        if event.attempt != self.attempt:
            return
        if isinstance(event, GenerationCompleted | ObservationRecorded):
            self.answers.setdefault(event.call, event)
        elif is_the_agents(event):
            self.requests.setdefault(event.call, event)

    @property
    def cut(self) -> bool:
        """Whether something other than the agent ended it, so that the record stops early."""
        if self.outcome is None:
            return True
        return self.outcome.ending in UNREWARDED | COUNTED and not self.raised

    @property
    def raised(self) -> bool:
        """Whether the code of the agent or its environment raised an exception."""
        if self.outcome is None:
            return False
        failure = self.outcome.failure
        own = failure is not None and failure.code == "agent_error"
        return own or self.outcome.ending == "exception"

    def diverged(self, call: str, then: dict[str, Any], now: dict[str, Any]) -> Divergence:
        """Makes a divergence of this attempt."""
        return Divergence(self.started.task, self.started.sample, self.attempt, call, then, now)


def is_the_agents(request: Request) -> bool:
    """Whether the agent's code makes such a request, and not Headrace after the agent's end."""
    if isinstance(request, GenerationRequested):
        return request.kind == "generate"
    return request.kind not in ("close", "collect")


class _Stopped(BaseException):
    """Ends the agent from inside. It is not an Exception, so that the agent does not catch it."""


class _Runtime:
    """Answers an Episode's requests from the record."""

    def __init__(self, recorded: RecordedAttempt) -> None:
        self.started = recorded.started
        self.attempt = recorded.attempt
        self.asked: set[str] = set()
        self.divergence: Divergence | None = None
        self._recorded = recorded

    async def ask_policy(self, request: GenerationRequested) -> GenerationCompleted:
        """Returns the recorded generation."""
        return self._answer(request, GenerationCompleted)

    async def ask_environment(self, request: ActionRequested) -> ObservationRecorded:
        """Returns the recorded observation."""
        return self._answer(request, ObservationRecorded)

    def _answer(self, request: Request, kind: type[A]) -> A:
        recorded, call = self._recorded, request.call
        asked, answer = recorded.requests.get(call), recorded.answers.get(call)
        known = asked or answer
        self.asked.add(call)
        if known is None and not recorded.cut:
            self._diverge(call, _ended(recorded.outcome), describe(request))
        if known is not None and known.digest != request.digest:
            then = {"ask": "something that is no longer kept"} if asked is None else describe(asked)
            self._diverge(call, then, describe(request))
        if not isinstance(answer, kind):
            raise _Stopped  # The record ends here.
        if answer.failure is not None and answer.failure.origin != "policy":
            raise _Stopped  # The attempt ended here.
        return answer

    def _diverge(self, call: str, then: dict[str, Any], now: dict[str, Any]) -> None:
        self.divergence = self.divergence or self._recorded.diverged(call, then, now)
        raise _Stopped


async def replay_attempt(recorded: RecordedAttempt, setup: AgentSetup) -> Divergence | None:
    """Runs the agent against the record. Returns None if it does what the record says."""
    runtime = _Runtime(recorded)
    episode = Episode(runtime, setup.options)

    async def play() -> None:
        with exits_contained():
            await setup.agent(episode)

    agent = asyncio.create_task(play())
    await asyncio.wait({agent}, timeout=AGENT_S)
    if not agent.done():
        agent.cancel()
        await asyncio.wait({agent}, timeout=1.0)
        return recorded.diverged(
            END, _ended(recorded.outcome), {"ask": f"no end within {AGENT_S:g} s"}
        )
    if runtime.divergence is not None:
        agent.cancelled() or agent.exception()  # Retrieved, so that asyncio does not log it.
        return runtime.divergence
    return _judge(recorded, setup, episode, runtime.asked, error_of(agent))


def _judge(
    recorded: RecordedAttempt,
    setup: AgentSetup,
    episode: Episode,
    asked: set[str],
    error: BaseException | None,
) -> Divergence | None:
    """Compares the end of an agent that ended by itself with the recorded one."""
    if isinstance(error, _Stopped):
        return None
    ending: Ending = "finished"
    if isinstance(error, EpisodeStopped):
        ending = error.ending
    elif error is not None:
        return _judge_error(recorded, error)
    left = next((one for call, one in recorded.requests.items() if call not in asked), None)
    if left is not None:
        return recorded.diverged(
            left.call, describe(left), {"ask": "nothing more", "ending": ending}
        )
    if recorded.cut:
        return None
    now = outcome_of(
        recorded.started,
        ending,
        None,
        attempt=recorded.attempt,
        episode=episode,
        earned=earned_reward(recorded.started, setup, episode, ending),
    )
    assert recorded.outcome is not None
    then_end, now_end = _end(recorded.outcome), _end(now)
    return None if then_end == now_end else recorded.diverged(END, then_end, now_end)


def _judge_error(recorded: RecordedAttempt, error: BaseException) -> Divergence | None:
    if not isinstance(error, Exception | asyncio.CancelledError):
        raise error
    if recorded.raised:
        return None
    raised = {"ask": "nothing more", "raised": f"{type(error).__name__}: {error}"}
    return recorded.diverged(END, _ended(recorded.outcome), raised)


def describe(request: Request) -> dict[str, Any]:
    """Returns what a request asks for as JSON values: everything that its digest covers."""
    tree = readable(request)
    if isinstance(request, GenerationRequested):
        meant = ("policy", "pinned", "sampling", "tokens", "text", "chat", "demonstration")
        return {"ask": "generate", **_only(tree, *meant)}
    return {"ask": request.kind, **_only(tree, "index", "environment", "payload")}


def _only(tree: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: tree[name] for name in names}


def _ended(outcome: EpisodeEnded | None) -> dict[str, Any]:
    return {"ask": "nothing more", **({} if outcome is None else {"ending": outcome.ending})}


def _end(outcome: EpisodeEnded) -> dict[str, Any]:
    return _only(readable(outcome), "ending", "reward", "rewards", "policies", "masked")
