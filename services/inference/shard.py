"""The inference worker's share of one partition of prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from headrace.errors import InfrastructureError
from headrace.schemas.events import Event, GenerationCompleted, GenerationRequested, Ref
from headrace.services.inference.pinned import PinnedVersions
from headrace.services.inference.serving import ServedPolicy, Slot
from headrace.services.log.event_log import Delivery


class Hands(Protocol):
    """What the shard uses of its ShardContext."""

    caught_up: bool

    async def send(self, event: Event) -> Ref:
        """See ShardContext."""

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """See ShardContext."""

    def hold(self, delivery: Delivery[Event]) -> Callable[[], None]:
        """See ShardContext."""


class PromptShard:
    """Answers prompts as slots free up; each is held until its answer is durable.

    Those that are pinned to a version are answered beside the others, and never keep them waiting.

    A prompt that comes again while its first is in flight is held with it, and answered once. On
    revocation what is unfinished is abandoned: the next owner reads it again.
    """

    def __init__(
        self, hands: Hands, policy: ServedPolicy, pinned: PinnedVersions | None = None
    ) -> None:
        """`pinned` is None where the policy has but one version."""
        self._hands = hands
        self._policy = policy
        self._pinned = pinned
        self._holds: dict[str, list[Callable[[], None]]] = {}
        """Of each prompt in flight, by event id."""
        self._unread: dict[str, GenerationRequested] = {}
        """What came while catching up, when nothing may be answered."""

    async def on_event(self, delivery: Delivery[GenerationRequested]) -> None:
        """Starts a prompt. Waits for a slot: that is what slows the intake down."""
        request = delivery.event
        prompt_id = request.event_id
        held = self._holds.get(prompt_id)
        if held is not None:
            held.append(self._hands.hold(delivery))
            return
        self._holds[prompt_id] = [self._hands.hold(delivery)]
        if self._hands.caught_up:
            await self._start(prompt_id, request)
        else:
            self._unread[prompt_id] = request

    async def on_caught_up(self) -> None:
        """Starts what came before."""
        unread, self._unread = self._unread, {}
        for prompt_id, request in unread.items():
            await self._start(prompt_id, request)

    async def aclose(self) -> None:
        """Nothing to say: what is in flight is cancelled with the shard's tasks."""

    async def _start(self, prompt_id: str, request: GenerationRequested) -> None:
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        if self._pinned is not None and request.pinned is not None:
            self._hands.spawn(self._answer_pinned(prompt_id, request, self._pinned), prompt_id)
            return
        slot = await self._policy.slots.take()
        self._policy.metrics.busy.inc()
        work = self._answer(prompt_id, request, slot, loop.time() - arrived)
        task = self._hands.spawn(work, prompt_id)
        # Not in the task itself: one that is cancelled before its first step runs no `finally`.
        task.add_done_callback(lambda _: self._free(slot))

    async def _answer(
        self, prompt_id: str, request: GenerationRequested, slot: Slot, queue_s: float
    ) -> None:
        answer = await self._policy.complete(request, slot, queue_s)
        slot.free()  # the next prompt need not wait until this answer is durable
        await self._deliver(prompt_id, answer)

    async def _answer_pinned(
        self, prompt_id: str, request: GenerationRequested, pinned: PinnedVersions
    ) -> None:
        """Answers by the version asked for. How many wait, the limit of live episodes bounds."""
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        try:
            served, slot = await pinned.take(request)
        except InfrastructureError as error:
            failed = self._policy.failed(request, error, loop.time() - arrived)
            await self._deliver(prompt_id, failed)
            return
        try:
            answer = await served.complete(request, slot, loop.time() - arrived)
        finally:
            slot.free()
            pinned.done()
        await self._deliver(prompt_id, answer)

    async def _deliver(self, prompt_id: str, answer: GenerationCompleted | None) -> None:
        """Writes an answer, and lets its prompt go. None where the engine was closed."""
        if answer is None:
            return
        await self._hands.send(answer)
        for release in self._holds.pop(prompt_id):
            release()

    def _free(self, slot: Slot) -> None:
        slot.free()
        self._policy.metrics.busy.dec()
