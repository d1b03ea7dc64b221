"""Lists the processes of a recipe's run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from headrace.schemas.recipe.recipe import Recipe
from headrace.services.operate.processes import headrace_command
from headrace.services.operate.run.supervisor import ChildSpec

MAY_END = ("source", "evaluation")
"""Services that can complete their work before the run ends."""


def child_specs(
    recipe: Recipe,
    resolved: Path,
    metrics_port: int = 0,
    services: Collection[str] | None = None,
) -> list[ChildSpec]:
    """Returns one child per process. Those with the longest imports come first.

    `resolved` is the file of the resolved recipe. The first child serves its metrics on
    `metrics_port`, and each further child on the next port; 0 disables metrics. With `services`,
    only the children of those services are returned.
    """
    specs = []
    for number, (name, service, policy) in enumerate(_processes(recipe)):
        if services is not None and service not in services:
            continue
        arguments = ["serve", service, str(resolved), "--parent-fd", "{parent_fd}"]
        if policy is not None:
            arguments += ["--policy", policy]
        if metrics_port:
            arguments += ["--metrics-port", str(metrics_port + number)]
        specs.append(ChildSpec(name, headrace_command(*arguments), may_end=service in MAY_END))
    return specs


def services_of(recipe: Recipe) -> list[str]:
    """Returns the services of a run, each one once."""
    return list(dict.fromkeys(service for _, service, _ in _processes(recipe)))


def _processes(recipe: Recipe) -> Iterator[tuple[str, str, str | None]]:
    """Yields the name, service and policy of each process."""
    several = len(recipe.policies) > 1
    for policy in recipe.policies:
        yield (f"trainer-{policy}" if several else "trainer"), "trainer", policy
    counts = {"inference": recipe.workers.inference, "agent": recipe.workers.agent}
    if any(agent.use == "client" for agent in recipe.agents.values()):
        # A gateway is an agent worker. There is only one, because clients need one address.
        del counts["agent"]
        counts["gateway"] = 1
    if any(not environment.external for environment in recipe.environments.values()):
        counts["env"] = recipe.workers.env
    for service, count in counts.items():
        for number in range(1, count + 1):
            yield (f"{service}-{number}" if count > 1 else service), service, None
    yield "assemble-groups", "assemble-groups", None
    for name, policy_settings in recipe.policies.items():
        if policy_settings.training is not None:
            for job in ("assemble-batches", "item-statistics"):
                yield (f"{job}-{name}" if several else job), job, name
    yield "scheduler", "scheduler", None
    if recipe.evaluation is not None and recipe.tasks.purpose == "train":
        yield "evaluation", "evaluation", None
    yield "source", "source", None
