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
    spare = {name for name, _, _ in _spares(recipe)}
    return [
        spec
        for name, service, spec in _specs(recipe, resolved, metrics_port)
        if name not in spare and (services is None or service in services)
    ]


def scaled_specs(recipe: Recipe, resolved: Path, metrics_port: int = 0) -> list[ChildSpec]:
    """Returns a child for each inference worker that a run may have, first those that start at
    once. `resolved` and `metrics_port` are those of `child_specs`."""
    specs = _specs(recipe, resolved, metrics_port)
    return [spec for _, service, spec in specs if service == "inference"]


def _specs(
    recipe: Recipe, resolved: Path, metrics_port: int
) -> Iterator[tuple[str, str, ChildSpec]]:
    """Yields name, service and child of each process, also of those that may be added."""
    processes = [*_processes(recipe), *_spares(recipe)]
    for number, (name, service, policy) in enumerate(processes):
        arguments = ["serve", service, str(resolved), "--parent-fd", "{parent_fd}"]
        if policy is not None:
            arguments += ["--policy", policy]
        if metrics_port:
            arguments += ["--metrics-port", str(metrics_port + number)]
        command = headrace_command(*arguments)
        yield name, service, ChildSpec(name, command, may_end=service in MAY_END)


def services_of(recipe: Recipe) -> list[str]:
    """Returns the services of a run, each one once."""
    return list(dict.fromkeys(service for _, service, _ in _processes(recipe)))


def _processes(recipe: Recipe) -> Iterator[tuple[str, str, str | None]]:
    """Yields the name, service and policy of each process."""
    several = len(recipe.policies) > 1
    for policy, settings in recipe.policies.items():
        if settings.training is None or not settings.training.external:
            yield (f"trainer-{policy}" if several else "trainer"), "trainer", policy
    counts = {"inference": recipe.workers.inference, "agent": recipe.workers.agent}
    if any(agent.use == "client" for agent in recipe.agents.values()):
        # A gateway is an agent worker. There is only one, because clients need one address.
        del counts["agent"]
        counts["gateway"] = 1
    if any(not environment.external for environment in recipe.environments.values()):
        counts["env"] = recipe.workers.env
    for service, count in counts.items():
        numbered = count > 1 or (service == "inference" and recipe.workers.autoscale is not None)
        for number in range(1, count + 1):
            yield (f"{service}-{number}" if numbered else service), service, None
    yield "assemble-groups", "assemble-groups", None
    for name, policy_settings in recipe.policies.items():
        if policy_settings.training is not None:
            for job in ("assemble-batches", "item-statistics"):
                yield (f"{job}-{name}" if several else job), job, name
    for number in range(1, recipe.workers.project_turns + 1):
        several_jobs = recipe.workers.project_turns > 1
        yield (
            (f"project-turns-{number}" if several_jobs else "project-turns"),
            "project-turns",
            None,
        )
    yield "scheduler", "scheduler", None
    if recipe.evaluation is not None and recipe.tasks.purpose == "train":
        yield "evaluation", "evaluation", None
    yield "source", "source", None


def _spares(recipe: Recipe) -> Iterator[tuple[str, str, str | None]]:
    """Yields the inference workers that autoscaling may add."""
    if recipe.workers.autoscale is not None:
        for number in range(recipe.workers.inference + 1, recipe.workers.autoscale.most + 1):
            yield f"inference-{number}", "inference", None
