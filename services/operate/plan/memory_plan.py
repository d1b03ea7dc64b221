"""What a recipe needs on each GPU and of the host's memory, and which changes make it fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.recipe.policy import Lora, Policy
from headrace.services.operate.plan.memory_parts import (
    GIB,
    RESERVE,
    EngineMemory,
    TrainerMemory,
)
from headrace.services.operate.plan.model_shape import ModelShape

GPUS = re.compile(r"(?P<count>[1-9][0-9]{0,4})x(?P<gib>[0-9]{1,5}(\.[0-9]+)?)")
FEWEST_TOKENS = 1024
"""Fewer tokens of a micro-batch are not suggested."""
MOST_RANKS = 1024
"""More GPUs are not suggested."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """Equal GPUs. Each has one rank of the trainer, and one engine if it is not on the CPU."""

    count: int
    gib: float
    engines_apart: bool = False
    """Whether the engines have other GPUs, of the same size."""

    @classmethod
    def parse(cls, text: str, engines_apart: bool = False) -> Gpus:
        """Reads `8x80`: the number of GPUs, and the GiB of each. Raises UsageError."""
        found = GPUS.fullmatch(text)
        if found is None or float(found["gib"]) == 0:
            raise UsageError(f"--gpus {text!r}: write COUNTxGIB, for example 8x80")
        return cls(int(found["count"]), float(found["gib"]), engines_apart)


@dataclass(frozen=True)
class MemoryPlan:
    """The plan of all policies of a recipe."""

    policies: Mapping[str, tuple[Policy, ModelShape]]
    gpus: Gpus

    def trainer_parts(self) -> dict[str, int]:
        """Returns the bytes of each part of the trainers' ranks on one GPU, as `policy: part`."""
        return {
            f"{name}: {part}": size
            for name, (policy, shape) in self.policies.items()
            if policy.training is not None and policy.training.device != "cpu"
            for part, size in self._trainer(policy, shape).parts().items()
            if size
        }

    def engine_parts(self) -> dict[str, int]:
        """Returns the bytes of each part of the engines on one GPU."""
        found = {}
        for name, engine in self._engines():
            found[f"{name}: engine's weights"] = engine.weights
            found[f"{name}: engine's KV cache"] = engine.cache
        return found

    def ram_parts(self) -> dict[str, int]:
        """Returns the bytes of each part in the memory of one rank's host, without other services.

        What a rank loads is the model in float32. What it publishes are the newest weights and the
        version before, from which the delta is made.
        """
        found: dict[str, int] = {}
        for name, (policy, shape) in self.policies.items():
            if policy.training is None:
                continue
            trainer = self._trainer(policy, shape)
            if policy.training.device == "cpu":
                found |= {f"{name}: {part}": size for part, size in trainer.parts().items()}
            found[f"{name}: model while it is loaded"] = 4 * shape.parameters
            found[f"{name}: published weights"] = 2 * trainer.published
            found[f"{name}: copy to undo a batch"] = trainer.rollback
        return {part: size for part, size in found.items() if size}

    @property
    def gpu_total(self) -> int:
        """Bytes on each GPU, or on the fuller one if the engines are apart."""
        sizes = [sum(parts.values()) for parts in (self.trainer_parts(), self.engine_parts())]
        total = max(sizes) if self.gpus.engines_apart else sum(sizes)
        return total + RESERVE if total else 0

    @property
    def ram_total(self) -> int:
        """Bytes of the host's memory for each rank."""
        return sum(self.ram_parts().values())

    @property
    def fits(self) -> bool:
        """Whether the parts fit on each GPU."""
        return self.gpu_total <= self.gpus.gib * GIB

    def cached_tokens(self) -> dict[str, int]:
        """Returns how many tokens the KV cache of each policy's engine holds."""
        return {name: engine.cache // engine.of_token for name, engine in self._engines()}

    def changes(self) -> list[tuple[str, MemoryPlan]]:
        """Returns changes, the cheapest first, each with the plan after it and all before it.

        It ends with the first one that fits. If none fits, the last one is still too large.
        """
        found: list[tuple[str, MemoryPlan]] = []
        for text, then in _steps(self):
            found.append((text, then))
            if then.fits:
                break
        return found

    def _trainer(self, policy: Policy, shape: ModelShape) -> TrainerMemory:
        assert policy.training is not None, "only policies in training have a trainer"
        on_gpu = policy.training.device != "cpu"
        return TrainerMemory(policy, shape, self.gpus.count if on_gpu else 1, on_gpu)

    def _engines(self) -> Iterator[tuple[str, EngineMemory]]:
        for name, (policy, shape) in self.policies.items():
            if policy.engine.device != "cpu" and policy.engine.use in ("torch", "vllm"):
                context = int(policy.engine.options.get("context") or shape.context)
                yield name, EngineMemory(policy, shape, int(self.gpus.gib * GIB), context)


def _steps(plan: MemoryPlan) -> Iterator[tuple[str, MemoryPlan]]:
    """Yields changes of the policies in training, each on top of those before."""
    trained = {
        name: policy for name, (policy, _) in plan.policies.items()
        if policy.training is not None and policy.training.device != "cpu"
    }  # fmt: skip
    for name, policy in trained.items():
        assert policy.training is not None, "chosen above"
        least = max(FEWEST_TOKENS, int(policy.engine.options.get("context") or 0))
        tokens = policy.training.max_tokens
        while tokens > least:
            tokens = max(least, tokens // 2)
            plan = _changed(plan, name, max_tokens=tokens)
            yield f"policies.{name}.training.max_tokens = {tokens}", plan
    for name, policy in trained.items():
        assert policy.training is not None, "chosen above"
        if not policy.training.activation_checkpointing:
            plan = _changed(plan, name, activation_checkpointing=True)
            yield f"policies.{name}.training.activation_checkpointing = true", plan
    fewer = plan
    while trained and plan.gpus.count < MOST_RANKS:
        plan = MemoryPlan(plan.policies, replace(plan.gpus, count=plan.gpus.count * 2))
        if plan.fits:
            yield f"{plan.gpus.count} GPUs, with a rank of the trainer on each", plan
            return
    plan = fewer
    for name, policy in trained.items():
        if policy.lora is None:
            changed, shape = plan.policies[name]
            adapted = changed.model_copy(update={"lora": Lora()})
            plan = MemoryPlan({**plan.policies, name: (adapted, shape)}, plan.gpus)
            yield f"policies.{name}.lora = {{ rank = {Lora().rank} }}", plan


def _changed(plan: MemoryPlan, name: str, **keys: Any) -> MemoryPlan:
    policy, shape = plan.policies[name]
    assert policy.training is not None, "only policies in training are changed"
    training = policy.training.model_copy(update=keys)
    changed = policy.model_copy(update={"training": training})
    return MemoryPlan({**plan.policies, name: (changed, shape)}, plan.gpus)
