"""The inference worker's part of one partition of prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.errors import InfrastructureError
from headrace.schemas.events import GenerationCompleted, GenerationRequested
from headrace.services.base.concurrency import until_first
from headrace.services.inference.drain import Drain
from headrace.services.inference.engine_slots import Slot
from headrace.services.inference.pinned import PinnedVersions
from headrace.services.inference.serving import ServedPolicy
from headrace.services.log.event_log import Delivery
from headrace.services.worker.limits.shared_limits import LeaseOver
from headrace.services.worker.shard import ShardContext


class PromptShard:
    """Answers prompts as slots become free, and holds each prompt until its answer is durable.

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
        self._unread: dict[str, GenerationRequested] = {}
        """Prompts that came while the shard was catching up and might not answer."""

    async def on_event(self, delivery: Delivery[GenerationRequested]) -> None:
        """Starts a prompt. Waits for a slot, which slows the intake down."""
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
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        if await self._hand_over(prompt_id, request):
            return
        if self._pinned is not None and request.pinned is not None:
            self._context.spawn(self._answer_pinned(prompt_id, request, self._pinned), prompt_id)
            return
        if self._policy.is_behind(request):
            self._context.spawn(self._answer_later(prompt_id, request, arrived), prompt_id)
            return
        slot = await self._slot(prompt_id, request)
        if slot is None:
            return
        self._policy.metrics.busy.inc()
        work = self._answer(prompt_id, request, slot, loop.time() - arrived)
        task = self._context.spawn(work, prompt_id)
        # A task that is cancelled before its first step runs no `finally`, so it can't do this.
        task.add_done_callback(lambda _: self._free(slot))

    async def _answer(
        self, prompt_id: str, request: GenerationRequested, slot: Slot, queue_s: float
    ) -> None:
        try:
            answer = await self._policy.complete(request, slot, queue_s)
        except LeaseOver:
            arrived = asyncio.get_running_loop().time() - queue_s
            self._context.spawn(self._answer_later(prompt_id, request, arrived), prompt_id)
            return
        slot.free()  # the next prompt need not wait until this answer is durable
        await self._deliver(prompt_id, answer)

    async def _answer_later(
        self, prompt_id: str, request: GenerationRequested, arrived: float
    ) -> None:
        """Answers once the engine has loaded the version that the prompt asks for.

        The prompts behind it go on. The limit of live episodes bounds how many wait.
        """
        drains = asyncio.Event() if self._drain is None else self._drain.asked
        await until_first(self._policy.catch_up(request), drains.wait())
        slot = await self._slot(prompt_id, request)
        if slot is None:
            return
        self._policy.metrics.busy.inc()
        try:
            queue_s = asyncio.get_running_loop().time() - arrived
            await self._answer(prompt_id, request, slot, queue_s)
        finally:
            self._free(slot)

    async def _slot(self, prompt_id: str, request: GenerationRequested) -> Slot | None:
        """Waits for a slot. Returns None if another worker got the prompt."""
        drain, slots, permits = self._drain, self._policy.slots, self._policy.permits
        if drain is None:
            return await slots.take(permits)
        while not await self._hand_over(prompt_id, request):
            slot = await slots.take_unless(lambda: drain.can_hand_over(request.policy), permits)
            if slot is not None:
                return slot
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

    def _free(self, slot: Slot) -> None:
        slot.free()
        self._policy.metrics.busy.dec()
