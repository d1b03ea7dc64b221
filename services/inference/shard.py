"""The inference worker's part of one partition of prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.errors import InfrastructureError
from headrace.schemas.events import GenerationCompleted, GenerationRequested
from headrace.services.base import clock
from headrace.services.base.concurrency import until_first
from headrace.services.inference.drain import Drain
from headrace.services.inference.engine_slots import Slot
from headrace.services.inference.pinned import PinnedVersions
from headrace.services.inference.serving import ServedPolicy
from headrace.services.log.event_log import Delivery
from headrace.services.worker.limits.shared_limits import LeaseOver
from headrace.services.worker.shard import ShardContext

LOOK_AHEAD = 256
"""At most so many prompts of one partition wait for a slot. Those behind them are not looked at, so
none of them can overtake, whatever its priority."""


class PromptShard:
    """Answers prompts as slots become free, and holds each prompt until its answer is durable.

    The highest priority goes first (`Slots`), among the LOOK_AHEAD prompts that wait for a slot.
    Prompts that are pinned to a version are answered concurrently and never delay the others. If a
    prompt comes again while it is in flight, both records are held and one answer is sent. On
    revocation unfinished prompts are abandoned: the next owner reads them again. While the worker
    drains, prompts that have not started are handed over to other workers.
    """

    def __init__(
        self,
        context: ShardContext,
        policy: ServedPolicy,
        pinned: PinnedVersions | None = None,
        drain: Drain | None = None,
    ) -> None:
        """`pinned` is None if the policy has only one version; `drain`, if it never drains."""
        self._context = context
        self._policy = policy
        self._drain = drain
        self._pinned = pinned
        self._holds: dict[str, list[Callable[[], None]]] = {}
        """The holds of each prompt in flight, by event id."""
        self._ahead: set[str] = set()
        """Prompts that wait for a slot, but for those that waited for a version before."""
        self._room = asyncio.Event()
        """Set when one of them waits no longer."""
        self._unread: dict[str, GenerationRequested] = {}
        """Prompts that came while the shard was catching up and might not answer."""

    async def on_event(self, delivery: Delivery[GenerationRequested]) -> None:
        """Starts a prompt. Waits if LOOK_AHEAD others wait, which slows the intake down."""
        request = delivery.event
        prompt_id = request.event_id
        held = self._holds.get(prompt_id)
        if held is not None:
            held.append(self._context.hold(delivery))
            return
        self._holds[prompt_id] = [self._context.hold(delivery)]
        if self._context.caught_up:
            await self._start(prompt_id, request)
        else:
            self._unread[prompt_id] = request

    async def on_caught_up(self) -> None:
        """Starts the prompts that came while catching up."""
        unread, self._unread = self._unread, {}
        for prompt_id, request in unread.items():
            await self._start(prompt_id, request)

    async def aclose(self) -> None:
        """Sends nothing: prompts in flight are cancelled with the tasks of the shard."""

    async def _start(self, prompt_id: str, request: GenerationRequested) -> None:
        arrived = asyncio.get_running_loop().time()
        if await self._hand_over(prompt_id, request):
            return
        if self._pinned is not None and request.pinned is not None:
            self._context.spawn(self._answer_pinned(prompt_id, request, self._pinned), prompt_id)
            return
        if self._policy.is_behind(request):
            self._context.spawn(self._answer_later(prompt_id, request, arrived), prompt_id)
            return
        while len(self._ahead) >= LOOK_AHEAD:
            self._room.clear()
            await self._room.wait()
        self._ahead.add(prompt_id)
        self._context.spawn(self._answer(prompt_id, request, arrived), prompt_id)

    async def _answer_later(
        self, prompt_id: str, request: GenerationRequested, arrived: float
    ) -> None:
        """Answers once the engine has loaded the version that the prompt asks for.

        The prompts behind it go on. The limit of live episodes bounds how many wait.
        """
        drains = asyncio.Event() if self._drain is None else self._drain.asked
        await until_first(self._policy.catch_up(request), drains.wait())
        await self._answer(prompt_id, request, arrived)

    async def _answer(self, prompt_id: str, request: GenerationRequested, arrived: float) -> None:
        """Answers as soon as a slot is free."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                slot = await self._slot(prompt_id, request, arrived)
            finally:
                self._ahead.discard(prompt_id)
                self._room.set()
            if slot is None:
                return
            self._policy.metrics.busy.inc()
            try:
                answer = await self._policy.complete(request, slot, loop.time() - arrived)
                break
            except LeaseOver:
                continue
            finally:
                slot.free()  # the next prompt need not wait until this answer is durable
                self._policy.metrics.busy.dec()
        await self._deliver(prompt_id, answer)

    async def _slot(
        self, prompt_id: str, request: GenerationRequested, arrived: float
    ) -> Slot | None:
        """Waits for a slot. Returns None if the prompt needs none any more.

        It needs none if another worker got it, or if it has expired and was answered so.
        """
        policy, drain = self._policy, self._drain

        def expired() -> bool:
            return clock.now_ms() >= request.expires_at

        def given_up() -> bool:
            return expired() or (drain is not None and drain.can_hand_over(request.policy))

        while not await self._hand_over(prompt_id, request):
            slot = await policy.slots.take_unless(given_up, policy.permits, request.priority)
            if slot is not None:
                return slot
            if expired():
                error = InfrastructureError("expired", "in the queue for a slot", retryable=False)
                queue_s = asyncio.get_running_loop().time() - arrived
                await self._deliver(prompt_id, policy.failed(request, error, queue_s))
                return None
        return None

    async def _hand_over(self, prompt_id: str, request: GenerationRequested) -> bool:
        """Returns whether another worker got the prompt. It is done here then."""
        if self._drain is None or not await self._drain.hand_over(request):
            return False
        self._release(prompt_id)
        return True

    async def _answer_pinned(
        self, prompt_id: str, request: GenerationRequested, pinned: PinnedVersions
    ) -> None:
        """Answers with the pinned version. The limit of live episodes bounds how many wait."""
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        answer: GenerationCompleted | None
        try:
            async with pinned.take(request) as (served, slot):
                answer = await served.complete(request, slot, loop.time() - arrived)
        except LeaseOver:
            self._context.spawn(self._answer_pinned(prompt_id, request, pinned), prompt_id)
            return
        except InfrastructureError as error:
            answer = self._policy.failed(request, error, loop.time() - arrived)
        await self._deliver(prompt_id, answer)

    async def _deliver(self, prompt_id: str, answer: GenerationCompleted | None) -> None:
        """Sends an answer and releases its prompt. The answer is None if the engine was closed."""
        if answer is None:
            return
        await self._context.send(answer)
        self._release(prompt_id)

    def _release(self, prompt_id: str) -> None:
        for release in self._holds.pop(prompt_id):
            release()
