"""Facts of a small run, to be stalled."""

from __future__ import annotations

from typing import Any

from headrace.schemas.events import (
    BatchAssembled,
    EnvironmentLoad,
    EnvironmentUse,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    GroupClosed,
    LoadReported,
    PolicyPublished,
    PoolLoad,
    Sampling,
    TaskSubmitted,
    Use,
)
from headrace.schemas.packed import pack_i32
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import Partition
from headrace.services.kafka.broker import Position
from headrace.services.operate.waits.run_facts import MemberCount, Request, RunFacts

NOW = 10_000.0
STALL_S = 12.0
"""How long the stall lasts when it is looked at: less than the 15 s within which it is named."""
RECIPE: dict[str, Any] = {
    "name": "test",
    "tasks": {"samples": 2, "environment": "default"},
    "environments": {"default": {"use": "null"}, "judge": {"use": "null"}},
    "policies": {"default": {"model": "tiny-llama", "batches": {"groups": 4}}},
}
SERVICES = ("scheduler", "agent", "env", "inference", "assemble-groups")


class StalledRun:
    """Facts of a run whose version 1 is published, with what a test adds."""

    def __init__(self, **recipe: Any) -> None:
        self.facts = RunFacts(Recipe.model_validate({**RECIPE, **recipe}), partitions=(4, 4))
        self.facts.started_at = NOW - 600
        for policy in self.facts.recipe.policies:
            self.publish(policy, 1, NOW - 100)
            self.batch(policy, 1, NOW - 101)
        self.facts.members = {name: MemberCount(1, 0, NOW - 600) for name in SERVICES}

    def add(self, event: Event, at: float, offset: int = 0) -> None:
        """Adds an event."""
        self.facts.on_event(event, at, offset)

    def publish(self, policy: str, version: int, at: float) -> None:
        """Publishes a version."""
        fields: dict[str, Any] = {"status": "trained", "digest": bytes(32), "step_s": 1.0}
        self.add(
            PolicyPublished(policy=policy, version=version, full_version=version, **fields), at
        )

    def batch(self, policy: str, version: int, at: float, **fields: Any) -> None:
        """Makes a batch, which has decided no task unless `fields` say so."""
        content: dict[str, Any] = {"samples": (), "low_mark": 0, "groups_read": 0, **fields}
        self.add(
            BatchAssembled(
                policy=policy, version=version, recipe=bytes(32), seed=0, sampled_tokens=0,
                **content,
            ),
            at,
        )  # fmt: skip

    def task(self, number: int, at: float, **fields: Any) -> TaskSubmitted:
        """Submits a task."""
        submitted = submitted_task(number, **fields)
        self.add(submitted, at, number)
        return submitted

    def start(self, number: int, at: float, **fields: Any) -> None:
        """Starts a task of two samples."""
        submitted = submitted_task(number, **fields)
        for sample in range(submitted.samples):
            self.add(
                EpisodeStarted(
                    task=number, sample=sample, submitted=submitted, seed=0, deadline=60_000
                ),
                at,
            )

    def end(self, number: int, at: float) -> None:
        """Ends a task's episodes."""
        for sample in range(2):
            self.add(EpisodeEnded(task=number, sample=sample, item_id="0", ending="finished"), at)

    def group(self, number: int, at: float, reason: str = "", policy: str = "default") -> None:
        """Closes a group."""
        verdict: Any = "dropped" if reason else "scored"
        self.add(
            GroupClosed(task=number, policy=policy, item_id="0", verdict=verdict, reason=reason),
            at,
        )

    def prompt(self, identity: str, at: float) -> None:
        """Asks for a generation, in partition 0."""
        place = Position(Partition("test.prompts.default.v1", 0), 0)
        self.facts.on_request(Request("prompt", identity, at, place, "default"))

    def action(self, identity: str, at: float) -> None:
        """Asks an environment, in partition 0."""
        place = Position(Partition("test.actions.v1", 0), 0)
        self.facts.on_request(Request("action", identity, at, place))

    def inference(self, at: float, **load: Any) -> None:
        """Has an inference worker report."""
        fields: dict[str, Any] = {
            "slots": 8, "busy": 1, "waiting": 0, "run_ms": 20, "version": 1, **load
        }  # fmt: skip
        pool = PoolLoad(policy="default", partitions=pack_i32([0, 1, 2, 3]), **fields)
        for number, then in enumerate((min(at, NOW - 600), at)):  # it has run for long
            report = LoadReported(
                worker="inference-a-1", number=number, every_ms=1000, pools=(pool,)
            )
            self.add(report, then)

    def env(self, at: float, *names: str, **load: Any) -> None:
        """Has an env worker report."""
        fields: dict[str, Any] = {
            "slots": 8, "busy": 1, "waiting": 0, "run_ms": 20, "open_ms": 100, **load
        }  # fmt: skip
        loads = tuple(
            EnvironmentLoad(environment=name, partitions=pack_i32([0, 1, 2, 3]), **fields)
            for name in names or ("default",)
        )
        for number, then in enumerate((min(at, NOW - 600), at)):
            report = LoadReported(
                worker="env-a-2", number=number, every_ms=1000, pools=(), environments=loads
            )
            self.add(report, then)


def submitted_task(number: int, **fields: Any) -> TaskSubmitted:
    """A task of two samples for the policy and the environment `default`."""
    given: dict[str, Any] = {
        "samples": 2,
        "environment": EnvironmentUse(use="default"),
        "roles": {"policy": Use(policy="default", sampling=Sampling(max_tokens=1))},
        **fields,
    }
    return TaskSubmitted(
        source="test", task_id=str(number), item_id="0", agent="default", max_turns=4,
        max_tokens=4, deadline_s=600, **given,
    )  # fmt: skip
