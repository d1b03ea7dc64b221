"""The hosts of one environment: one engine, or several that share the episodes.

If a host doesn't answer, its episodes fail as failures of the infrastructure, and new attempts go
to the others. Sweeps look whether it answers again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import DependencyError, InfrastructureError, UsageError
from headrace.services.env.environment import Claim
from headrace.services.env.sandbox import container_names as names
from headrace.services.env.sandbox.container_names import InUse
from headrace.services.env.sandbox.hosts.container_source import ContainerSource, Whose
from headrace.services.env.sandbox.hosts.docker_containers import DockerContainers
from headrace.services.env.sandbox.hosts.host_choice import choose_host
from headrace.services.env.sandbox.hosts.pods import Pods
from headrace.services.env.sandbox.hosts.sandbox_host import SandboxHost
from headrace.services.env.sandbox.sandbox import HostSettings
from headrace.services.processes.docker.docker_engine import DockerEngine
from headrace.services.processes.docker.ssh_forward import is_ssh, read_ssh_address
from headrace.services.processes.kubernetes.cluster_address import is_cluster

logger = logging.getLogger(__name__)

KINDS = {False: "the Docker engine", True: "the hosts"}
REMEDIES = {
    False: "Start it, and let this user open its socket; or name another one by DOCKER_HOST, "
    "`docker context use` or the option `hosts`",
    True: "See that they answer, and that the cluster has room: `kubectl get pods` and `kubectl "
    "get events` say what a pod waits for",
}


def remedy(host: str) -> str:
    """Returns what to do if a host does not answer."""
    by_ssh = ""
    if is_ssh(host):
        command = " ".join(read_ssh_address(host).command())
        by_ssh = f". `{command}` must work without a question"
    return f"{REMEDIES[is_cluster(host)]}{by_ssh}"


class SandboxHosts:
    """All engines of an environment."""

    def __init__(self, whose: Whose, engine: DockerEngine | None = None) -> None:
        """Without `hosts` in the recipe there is one: `engine`, or the command `docker`'s.

        Raises UsageError if one can't be used.
        """
        self._whose = whose
        self._sources: dict[str, str] = {}
        self.all = [
            SandboxHost(whose, self._source(host), host.slots) for host in whose.settings.hosts
        ] or [SandboxHost(whose, DockerContainers(whose, engine or DockerEngine(), self._sources))]

    def _source(self, host: HostSettings) -> ContainerSource:
        if is_cluster(host.url):
            return Pods(self._whose, host.url, self._sources)
        engine = DockerEngine(host.url, host.tls)
        return DockerContainers(self._whose, engine, self._sources)

    async def check(self) -> None:
        """Check all engines, and pull and pin the recipe's image.

        Raises DependencyError if not even one can be reached, UsageError if one is not suitable.
        """
        checking = (host.check() for host in self.all)
        ended = await asyncio.gather(*checking, return_exceptions=True)
        failed = [error for error in ended if error is not None]
        for error in failed:
            if not isinstance(error, InfrastructureError):
                raise error
        if len(failed) == len(self.all):
            engines = ", ".join(map(str, self.all))
            any_cluster = any(is_cluster(str(host)) for host in self.all)
            raise DependencyError(
                f"environments.{self._whose.key}: {KINDS[any_cluster]} at {engines} can't be used "
                f"({failed[0]}). {REMEDIES[any_cluster]}"
            ) from failed[0]

    def choose(self, image: str) -> SandboxHost:
        """Return the host that an episode of this image should go to."""
        return self.all[choose_host([host.load(image) for host in self.all])]

    def silent(self) -> str:
        """Return the end of a sentence that names the hosts that don't answer."""
        down = [str(host) for host in self.all if not host.up]
        return f", or on {', '.join(down)}, which did not answer" if down else ""

    async def of_episode(self, claim: Claim) -> list[tuple[SandboxHost, InUse, Mapping[str, Any]]]:
        """Return the containers of an episode, of every attempt.

        Hosts that don't answer are left out: their containers end at their deadline, or are swept.
        Raises InfrastructureError if no host answers.
        """
        asked = [host for host in self.all if host.up] or self.all
        pattern = names.of_episode(self._whose.namespace, claim)
        listing = (host.in_use(pattern) for host in asked)
        found, errors = [], []
        for host, listed in zip(
            asked, await asyncio.gather(*listing, return_exceptions=True), strict=True
        ):
            if isinstance(listed, BaseException):
                errors.append(listed)
            else:
                found += [(host, name, each) for name, each in listed]
        for error in errors:
            if not isinstance(error, InfrastructureError) or len(errors) == len(asked):
                raise error
        return found

    async def sweep(
        self, partition: int, read_to: int, open_attempt: Callable[[int, int], int | None]
    ) -> None:
        """Sweep all hosts, those that don't answer included. Raises what the last one raised."""
        sweeping = (host.sweep(partition, read_to, open_attempt) for host in self.all)
        ended = await asyncio.gather(*sweeping, return_exceptions=True)
        errors = [error for error in ended if isinstance(error, BaseException)]
        for error in errors:
            if isinstance(error, UsageError):  # a host that came late, and is not suitable
                logger.error("%s", error)
            elif not isinstance(error, InfrastructureError):
                raise error
        for error in errors:
            if isinstance(error, InfrastructureError):
                raise error
