"""Asks the hosts of a recipe's containers whether they answer, all at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from headrace.errors import DependencyError, InfrastructureError
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.env.instances import Instances
from headrace.services.env.sandbox.hosts.sandbox_host import SandboxHost
from headrace.services.env.sandbox.hosts.sandbox_hosts import remedy
from headrace.services.env.sandbox.pool import DockerSetup
from headrace.services.env.service import load_environments
from headrace.services.env.setup import Setup
from headrace.services.operate.check.checking import TRYING

CONTACT_S = 12.0
"""Seconds that a host has to answer. `ssh` has 10 s of it to connect, and then says why not."""


async def require_hosts(recipe: Recipe, say: Callable[[str], None]) -> None:
    """Asks each Docker engine and each cluster of a recipe once. `say` gets each before.

    Without `hosts` in the options of an environment that is the engine that the command `docker`
    would use. Nothing is pulled or started. Raises DependencyError that names all hosts that do not
    answer, and UsageError for one that is not suitable.
    """
    setups = load_environments(recipe, "check", Instances(drop, "check"))
    hosts = _hosts_of(setups)
    for (key, _), host in hosts.items():
        say(f"{TRYING}environments.{key}: does {host} answer?")
    try:
        found = await asyncio.gather(*(_problem(key, one) for (key, _), one in hosts.items()))
    finally:
        await asyncio.gather(*(host.aclose() for host in hosts.values()))
    if problems := [one for one in found if one]:
        raise DependencyError(". ".join(problems))


def _hosts_of(setups: Mapping[str, Setup]) -> dict[tuple[str, str], SandboxHost]:
    """Returns the hosts by environment and address."""
    return {
        (key, str(host)): host
        for key, setup in setups.items()
        if isinstance(setup, DockerSetup)
        for host in setup.hosts.all
    }


async def _problem(key: str, host: SandboxHost) -> str:
    """Returns why a host can't be used now, and what to do; an empty text if it answers."""
    try:
        async with asyncio.timeout(CONTACT_S):
            await host.source.reach()
    except TimeoutError:
        reason = f"no answer in {CONTACT_S:g} s"
    except InfrastructureError as error:
        reason = error.message
    else:
        return ""
    return f"environments.{key}: {host} can't be used ({reason}). {remedy(str(host))}"


async def drop(event: object) -> None:
    """Drops an event: a check reports nothing."""
