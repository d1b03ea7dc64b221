"""A tiny policy with a token to ramble learns to avoid it: the turn that overflows is trained on.

The engine, the agent, the groups, the batches and the learner are the real ones. A list stands in
for the log, and a few lines for the environment.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from headrace.schemas.events import (
    ActionRequested,
    EnvironmentUse,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    GenerationRequested,
    ObservationRecorded,
    PolicyPublished,
    Ref,
    Sampling,
    TaskSubmitted,
    TrajectoryRecorded,
    Use,
)
from headrace.schemas.packed import pack_i32
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.services.agent.agents import single_turn
from headrace.services.agent.episode_run import EpisodeRun
from headrace.services.agent.records import AgentSetup, task_ended
from headrace.services.base.clock import now, now_ms
from headrace.services.inference.engine import EngineSetup, Weights
from headrace.services.inference.engine_slots import Slots
from headrace.services.inference.engines.torch_engine import TorchEngine
from headrace.services.inference.serving import ServedPolicy
from headrace.services.inference.tokenizer import Tokenizer
from headrace.services.models.weights import model_folder
from headrace.stream_jobs.batches import BatchAssembler
from headrace.stream_jobs.groups import GroupAssembler
from headrace.trainer.learner import Learner
from headrace.trainer.loader import build_updates

FOLDER = model_folder("tiny-llama")
ANSWER, RAMBLE = "A", "R"
SAMPLES, GROUPS = 8, 4
VERSIONS = 12
CONTEXT = 3
"""One token of prompt, and two to answer: who rambles twice has not answered."""
RECIPE = parse_recipe(
    {
        "name": "ramble",
        "tasks": {"samples": SAMPLES},
        "agents": {"default": {"use": "single_turn", "unfinished_reward": 0.0}},
        "policies": {
            "default": {
                "model": "tiny-llama",
                "batches": {"groups": GROUPS},
                "training": {"learning_rate": 1e-2, "device": "cpu"},
            }
        },
    },
    "test",
)
TASK = TaskSubmitted(
    source="test", task_id="1", item_id="1", agent="default",
    environment=EnvironmentUse(use="default"), samples=SAMPLES, max_turns=1, max_tokens=8,
    deadline_s=60,
    roles={
        "policy": Use(
            policy="default",
            sampling=Sampling(
                max_tokens=8, allowed=pack_i32(list((ANSWER + RAMBLE).encode())), stop=(ANSWER,)
            ),
        )
    },
)  # fmt: skip


class Loop:
    """The services of one run, with a list in place of the log."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._learner = Learner(FOLDER, RECIPE.policies["default"])
        setup = EngineSetup(FOLDER, SAMPLES, device="cpu", options={"context": CONTEXT})
        self._engine = TorchEngine(setup)
        tokenizer = Tokenizer(FOLDER)
        self._policy = ServedPolicy("default", self._engine, Slots(self._engine), tokenizer, "w")
        self._setup = AgentSetup(single_turn, {}, RECIPE.agents["default"], {})
        self._groups = GroupAssembler(RECIPE)
        self._batches = BatchAssembler(RECIPE, "default")
        self._runs: dict[tuple[int, int], EpisodeRun] = {}
        self._log: list[Event] = []
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self) -> list[int]:
        """Returns how many episodes overflowed, by version."""
        await self._publish(0)
        overflows = [await self._version(version) for version in range(1, VERSIONS + 1)]
        await self._engine.close(1.0)
        return overflows

    async def _version(self, version: int) -> int:
        overflows = 0
        for task in range((version - 1) * GROUPS, version * GROUPS):
            outcomes = await asyncio.gather(*(self._play(task, one) for one in range(SAMPLES)))
            overflows += sum(outcome.ending == "overflow" for outcome in outcomes)
            (group,) = self._groups.on_task(task_ended(task, TASK, tuple(outcomes)), now_ms())
            self._batches.on_group(group, task)
        batch = self._batches.next_batch(float("inf"))
        assert batch is not None
        self._batches.on_batch(batch)
        events = [self._log[sample.trajectory.offset] for sample in batch.samples]
        updates, reasons = build_updates(batch, events, self._learner.vocabulary, 1)
        assert not reasons
        self._learner.train(updates)
        await self._publish(version)
        return overflows

    async def _publish(self, version: int) -> None:
        path = self._folder / f"{version}.safetensors"
        path.write_bytes(self._learner.weights())
        await self._engine.load(Weights("default", version, path))
        self._policy.on_loaded(version)
        fields: dict[str, Any] = {"digest": bytes(32), "full_version": version}
        self._batches.on_policy(
            PolicyPublished(policy="default", version=version, status="trained", **fields)
        )

    async def _play(self, task: int, sample: int) -> EpisodeEnded:
        deadline = now_ms() + 60_000
        started = EpisodeStarted(
            task=task, sample=sample, submitted=TASK, seed=0, deadline=deadline
        )
        run = EpisodeRun(self._send, started, now(), self._setup, {})
        self._runs[task, sample] = run
        await run.run()
        outcome = self._log[-1]
        assert isinstance(outcome, EpisodeEnded)
        return outcome

    async def _send(self, event: Event) -> Ref:
        self._log.append(event)
        offset = len(self._log) - 1
        if isinstance(event, GenerationRequested | ActionRequested):
            answering = asyncio.create_task(self._answer(event))
            self._answering.add(answering)
            answering.add_done_callback(self._answering.discard)
        elif not isinstance(event, TrajectoryRecorded):
            assert isinstance(event, EpisodeEnded)
        return Ref(topic="t", partition=0, offset=offset, digest=bytes(16))

    async def _answer(self, request: GenerationRequested | ActionRequested) -> None:
        run = self._runs[request.task, request.sample]
        if isinstance(request, GenerationRequested):
            answer = await self._policy.complete(request, await self._policy.slots.take(), 0.0)
            assert answer is not None
            run.on_answer(answer)
        elif request.kind != "close":
            step = request.kind == "step"
            run.on_answer(
                ObservationRecorded(
                    task=request.task, sample=request.sample, attempt=request.attempt,
                    call=request.call, index=request.index, digest=request.digest, text="?",
                    reward=1.0 if step else None, terminated=step,
                )
            )  # fmt: skip


def test_a_policy_learns_to_avoid_the_token_that_fills_its_context(tmp_path: Path) -> None:
    overflows = asyncio.run(Loop(tmp_path).run())
    assert sum(overflows[:2]) >= 6, overflows
    assert sum(overflows[-3:]) <= 4, overflows
