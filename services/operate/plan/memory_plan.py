"""What a recipe needs on each GPU and of the host's memory, and which changes make it fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.recipe.policy import Lora, Policy, Training
from headrace.services.operate.plan.memory_parts import (
    GIB,
    RESERVE,
    EngineMemory,
    TrainerMemory,
    engine_gpus,
    longest_sequence,
)
from headrace.services.operate.plan.model_shape import ModelShape

GPUS = re.compile(r"(?P<count>[1-9][0-9]{0,4})x(?P<gib>[0-9]{1,5}(\.[0-9]+)?)")
FEWEST_TOKENS = 1024
"""Fewer tokens of a micro-batch are not suggested."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """Equal GPUs. Each has one rank of the trainer, and an engine or its share of one, if these are
    not on the CPU."""

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
    ram: float | None = None
    """GiB of the host's memory for each rank. None: not known."""

    def __post_init__(self) -> None:
        """Raises UsageError if a trainer or an engine needs more GPUs than there are."""
        for name, (policy, _) in self.policies.items():
            ranks = policy.training.processes if policy.training is not None else 1
            if not _on_cpu(policy) and ranks > self.gpus.count:
                raise UsageError(
                    f"policies.{name}.training.processes is {ranks}, and --gpus says that there "
                    f"are {self.gpus.count}: each process needs a GPU of its own"
                )
            if (needed := engine_gpus(policy)) > self.gpus.count:
                raise UsageError(
                    f"policies.{name}.engine.options.tensor_parallel_size is {needed}, and --gpus "
                    f"says that there are {self.gpus.count}: lower it, or give more GPUs"
                )

    def trainer_parts(self) -> dict[str, int]:
        """Returns the bytes of each part of the trainers' ranks on one GPU, as `policy: part`."""
        return {
            f"{name}: {part}": size
            for name, (policy, shape) in self.policies.items()
            if _trained(policy) and not _on_cpu(policy)
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

        What a rank loads is its shard, in float32. What one process publishes are the newest
        weights and the version before, from which the delta is made. Those of several processes are
        files on disk.
        """
        return {
            f"{name}: {part}": size
            for name, (policy, shape) in self.policies.items()
            if _trained(policy)
            for part, size in self._ram_of_rank(policy, shape).items()
            if size
        }

    def _ram_of_rank(self, policy: Policy, shape: ModelShape) -> dict[str, int]:
        trainer = self._trainer(policy, shape)
        found = trainer.parts() if _on_cpu(policy) else trainer.host_parts()
        loaded = 4 * shape.parameters // trainer.ranks
        # With `offload`, the master weights are what was loaded.
        found["model while it is loaded"] = loaded - trainer.masters * trainer.offload
        found["published weights"] = 2 * trainer.published * (trainer.ranks == 1)
        found["copy to undo a batch"] = trainer.rollback
        return found

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
    def ram_of_machine(self) -> int:
        """Bytes of the host's memory for all ranks, if they are on one machine."""
        return sum(
            self._trainer(policy, shape).ranks * sum(self._ram_of_rank(policy, shape).values())
            for policy, shape in self.policies.values()
            if _trained(policy)
        )

    @property
    def ram_fits(self) -> bool:
        """Whether the host's memory is enough for each rank, or not known."""
        return self.ram is None or self.ram_total <= self.ram * GIB

    @property
    def fits(self) -> bool:
        """Whether the parts fit on each GPU."""
        return self.gpu_total <= self.gpus.gib * GIB

    def cached_tokens(self) -> dict[str, int]:
        """Returns how many tokens the KV cache of each policy's engine holds."""
        return {name: engine.cache // engine.of_token for name, engine in self._engines()}

    def batch_tokens(self) -> dict[str, int]:
        """Returns the tokens of the largest micro-batch of each policy that is trained."""
        return {
            name: self._trainer(policy, shape).tokens
            for name, (policy, shape) in self.policies.items()
            if _trained(policy)
        }

    def changes(self) -> list[tuple[str, MemoryPlan]]:
        """Returns changes, the cheapest first, each with the plan after it and all before it.

        It ends with the first one that fits. If none fits, the last one is still too large.
        """
        found: list[tuple[str, MemoryPlan]] = []
        for text, then in _steps(self):
            found.append((text, then))
            if then.fits and then.ram_fits:
                break
        return found

    def _trainer(self, policy: Policy, shape: ModelShape) -> TrainerMemory:
        assert policy.training is not None, "only policies in training have a trainer"
        return TrainerMemory(policy, shape, policy.training.processes, not _on_cpu(policy))

    def _engines(self) -> Iterator[tuple[str, EngineMemory]]:
        for name, (policy, shape) in self.policies.items():
            if policy.engine.device != "cpu" and policy.engine.use in ("torch", "vllm"):
                context = longest_sequence(policy, shape)
                yield name, EngineMemory(policy, shape, int(self.gpus.gib * GIB), context)


def _trained(policy: Policy) -> bool:
    """Returns whether Headrace's own trainer trains a policy."""
    return policy.training is not None and not policy.training.external


def _on_cpu(policy: Policy) -> bool:
    return policy.training is not None and policy.training.device == "cpu"


Step = tuple[str, MemoryPlan]
"""A change, and the plan after it and all before it."""


def _steps(plan: MemoryPlan) -> Iterator[Step]:
    """Yields changes of the policies in training, each on top of those before."""
    names = [
        name
        for name, (policy, _) in plan.policies.items()
        if _trained(policy) and not _on_cpu(policy)
    ]
    for kind in (_shorter, _smaller, _checkpointed, _sharded, _offloaded, _adapted):
        for name in names:
            for text, then in kind(plan, name):
                plan = then
                yield f"policies.{name}.{text}", plan


def _shorter(plan: MemoryPlan, name: str) -> Iterator[Step]:
    policy, shape = plan.policies[name]
    tokens = max(FEWEST_TOKENS, _training(plan, name).max_tokens)
    if longest_sequence(policy, shape) > tokens and "context" not in policy.engine.options:
        options = {**policy.engine.options, "context": tokens}
        engine = policy.engine.model_copy(update={"options": options})
        shorter = policy.model_copy(update={"engine": engine})
        yield f"engine.options.context = {tokens}", _with(plan, name, shorter)


def _smaller(plan: MemoryPlan, name: str) -> Iterator[Step]:
    least = max(FEWEST_TOKENS, longest_sequence(*plan.policies[name]))
    while (tokens := _training(plan, name).max_tokens) > least:
        tokens = max(least, tokens // 2)
        plan = _changed(plan, name, max_tokens=tokens)
        yield f"training.max_tokens = {tokens}", plan


def _checkpointed(plan: MemoryPlan, name: str) -> Iterator[Step]:
    if not _training(plan, name).activation_checkpointing:
        then = _changed(plan, name, activation_checkpointing=True)
        yield "training.activation_checkpointing = true", then


def _sharded(plan: MemoryPlan, name: str) -> Iterator[Step]:
    policy, _ = plan.policies[name]
    more = _training(plan, name).processes
    while policy.lora is None and not plan.fits and more * 2 <= plan.gpus.count:
        more *= 2
        plan = _changed(plan, name, processes=more)
        yield f"training.processes = {more}", plan


def _offloaded(plan: MemoryPlan, name: str) -> Iterator[Step]:
    policy, _ = plan.policies[name]
    then = _changed(plan, name, offload=True)
    if policy.lora is None and not _training(plan, name).offload and then.ram_fits:
        yield "training.offload = true", then


def _adapted(plan: MemoryPlan, name: str) -> Iterator[Step]:
    policy, _ = plan.policies[name]
    if policy.lora is None:
        alone = _training(plan, name).model_copy(update={"processes": 1, "offload": False})
        adapted = policy.model_copy(update={"lora": Lora(), "training": alone})
        yield f"lora = {{ rank = {Lora().rank} }}", _with(plan, name, adapted)


def _training(plan: MemoryPlan, name: str) -> Training:
    training = plan.policies[name][0].training
    assert training is not None, "only policies in training are changed"
    return training


def _changed(plan: MemoryPlan, name: str, **keys: Any) -> MemoryPlan:
    training = _training(plan, name).model_copy(update=keys)
    return _with(plan, name, plan.policies[name][0].model_copy(update={"training": training}))


def _with(plan: MemoryPlan, name: str, policy: Policy) -> MemoryPlan:
    _, shape = plan.policies[name]
    return replace(plan, policies={**plan.policies, name: (policy, shape)})
