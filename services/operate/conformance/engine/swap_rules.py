"""Rules about changes of weights, slots, cancelling and the end."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.errors import BlobError, InfrastructureError
from headrace.services.inference.engine import EngineOutput, Weights
from headrace.services.operate.conformance.conformance_report import NotChecked, require, rule
from headrace.services.operate.conformance.engine.trial import (
    EngineTrial,
    require_whole,
)
from headrace.services.operate.conformance.engine.trial_model import POLICY

TRIES = 4
"""How often a longer answer is tried, until weights change during it."""
LONGEST = 4_000
"""Tokens of the longest answer."""


class SwapRules:
    """The other rules, in the order in which they are tried. The last one closes the engine."""

    def __init__(self, trial: EngineTrial) -> None:
        self._trial = trial

    @rule("Raise InfrastructureError('no_weights') in generate().")
    async def a_policy_without_weights_is_refused(self) -> None:
        """A policy without weights has no answers."""
        engine = await self._trial.engine()
        try:
            await engine.generate(self._trial.prompt(policy="nobody"))
        except InfrastructureError:
            return
        require(False, "a policy for which load() was never called got an answer")

    @rule(
        "Replace the weights before load() returns, and drop caches of the old ones.",
        limit_s=300,
    )
    async def new_weights_are_used(self) -> None:
        """After load(), tokens have the new version and its logprobs."""
        for version in (self._trial.version + 1, self._trial.version + 2):
            await self._trial.load(version)
            asked = self._trial.prompt(8, temperature=1.0)
            [answer] = await self._trial.ask(asked)
            require(
                answer.versions == [version] * 8,
                f"after load() of version {version}, tokens have the versions {answer.versions}",
            )
            await self._trial.require_right(version, asked, answer)

    @rule(
        "Change weights between two tokens, and tag each token with the version that drew it.",
        limit_s=300,
    )
    async def weights_change_during_an_answer(self) -> None:
        """An answer continues when weights change."""
        await self._trial.load(self._trial.version + 1)
        context = (await self._trial.engine()).capacity().context
        wanted = 100
        for _ in range(TRIES):
            wanted = min(2 * wanted, context - 10, LONGEST)
            old = self._trial.version
            answer = await self._changed_during(wanted)
            new = self._trial.version
            versions = answer.versions
            require(len(answer.tokens) == wanted, f"{len(answer.tokens)} of {wanted} tokens came")
            require(
                len(versions) == wanted and set(versions) <= {old, new},
                f"{len(versions)} versions for {wanted} tokens, among them {sorted(set(versions))}",
            )
            require(versions == sorted(versions), "an older version came after a newer one")
            if versions[0] == old and versions[-1] == new:
                return
        raise NotChecked(f"the weights never changed during an answer of {wanted} tokens")

    async def _changed_during(self, wanted: int) -> EngineOutput:
        engine = await self._trial.engine()
        free = engine.capacity().free_slots
        running = asyncio.create_task(engine.generate(self._trial.prompt(wanted)))
        await self._trial.until(
            lambda: engine.capacity().free_slots < free or running.done(), "a slot being taken"
        )
        # The first token must be there, which nothing shows.
        await engine.generate(self._trial.prompt(2))
        await self._trial.load(self._trial.version + 1)
        return await running

    @rule("Keep prompts that run or wait when load() is called.", limit_s=120)
    async def no_prompt_is_lost_at_a_change(self) -> None:
        """All prompts are answered while weights change."""
        engine = await self._trial.load(self._trial.version + 1)
        asked = [self._trial.prompt(5 + n % 20) for n in range(8 * self._trial.slots)]
        running = [asyncio.create_task(engine.generate(one)) for one in asked]
        for _ in range(5):
            await asyncio.sleep(0.01)
            await self._trial.load(self._trial.version + 1)
        done, lost = await asyncio.wait(running, timeout=60)
        for task in lost:
            task.cancel()
        require(not lost, f"{len(lost)} of {len(asked)} prompts had no answer after 60 s")
        failed = [str(task.exception()) for task in done if task.exception() is not None]
        require(not failed, f"{len(failed)} of {len(asked)} prompts failed: {failed[:1]}")
        require_whole(asked, [task.result() for task in running])

    @rule("Check the file before anything changes, and raise BlobError.")
    async def damaged_weights_leave_the_old_ones(self) -> None:
        """A damaged or absent file: BlobError."""
        if self._trial.frozen:
            raise NotChecked("the engine serves one fixed version (--frozen)")
        engine = await self._trial.engine()
        damaged = self._trial.model.scratch / "damaged"
        damaged.write_bytes(b"these are no weights")
        for path in (damaged, Path(f"{damaged}-absent")):
            try:
                await engine.load(Weights(POLICY, self._trial.version + 1, path))
            except BlobError:
                continue
            require(False, f"load() of {path.name} weights returned")
        [answer] = await self._trial.ask(self._trial.prompt(1))
        require(
            answer.versions == [self._trial.version],
            f"version {self._trial.version} was loaded before, and now {answer.versions} answers",
        )

    @rule("Stop the sequence when generate() is cancelled.")
    async def cancelling_frees_the_slot(self) -> None:
        """A cancelled prompt frees its slot."""
        engine = await self._trial.engine()
        wanted = min(LONGEST, engine.capacity().context - 10)
        long = self._trial.prompt(wanted)
        running = [asyncio.create_task(engine.generate(long)) for _ in range(self._trial.slots)]
        await self._trial.until(
            lambda: engine.capacity().free_slots == 0 or any(one.done() for one in running),
            "all slots being taken",
        )
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await self._trial.until(
            lambda: engine.capacity().free_slots == self._trial.slots,
            f"{self._trial.slots} free slots after all prompts were cancelled",
        )
        [answer] = await self._trial.ask(self._trial.prompt(1))
        require(answer.finish == "length", f"the next prompt ended with {answer.finish!r}")

    @rule("Queue them inside the engine. capacity().free_slots is never negative.")
    async def prompts_wait_for_a_slot(self) -> None:
        """Prompts beyond the slots wait, and are answered."""
        engine = await self._trial.engine()
        asked = [self._trial.prompt(3) for _ in range(3 * self._trial.slots)]
        require_whole(asked, await self._trial.ask(*asked))
        free = engine.capacity().free_slots
        require(free == self._trial.slots, f"{free} of {self._trial.slots} slots are free after it")

    @rule(
        "Return unfinished answers with finish 'interrupted', and refuse new prompts with "
        "InfrastructureError('engine_closed')."
    )
    async def closing_ends_all(self) -> None:
        """close() returns in time, and open answers come back."""
        engine = await self._trial.engine()
        wanted = min(LONGEST, engine.capacity().context - 10)
        running = asyncio.create_task(engine.generate(self._trial.prompt(wanted)))
        await asyncio.sleep(0.05)
        began = asyncio.get_running_loop().time()
        await engine.close(1.0)
        took_s = asyncio.get_running_loop().time() - began
        require(took_s < 11, f"close(1.0) took {took_s:.1f} s; at most 11 s are allowed")
        done, _ = await asyncio.wait([running], timeout=1)
        require(bool(done), "an open answer did not come back within 1 s after close()")
        answer = running.result()
        require(
            answer.finish in ("interrupted", "length"),
            f"an open answer ended with {answer.finish!r}",
        )
        try:
            await engine.generate(self._trial.prompt(1))
        except InfrastructureError:
            return
        require(False, "the closed engine answered a prompt")
