"""Pods as sandboxes: made, found, claimed and removed, and commands that run in them.

A pod's name never changes. The name that says whose a sandbox is, and which action was begun last,
is in an annotation, and a rename is a JSON patch that tests the old value. The API server applies a
patch as a whole or refuses it, so of two workers that rename a sandbox one gets a Conflict.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import IO, Any

from headrace.errors import InfrastructureError, UsageError
from headrace.services.processes.docker.docker_errors import Conflict, NotThere
from headrace.services.processes.docker.hardened import KEEPER, Limits
from headrace.services.processes.kubernetes.cluster_address import read_address
from headrace.services.processes.kubernetes.command_stream import CommandStream, KeptStream
from headrace.services.processes.kubernetes.hardened_pod import (
    CONTAINER,
    NAME,
    keeper,
    label_value,
    limited,
    pod_name,
    user_of,
)
from headrace.services.processes.kubernetes.pod_states import (
    described,
    out_of_memory,
    state_of,
    waits_for,
    why_not_started,
)

FIRST_POLL_S = 0.1
POLL_S = 1.0
LONGEST_POLL_S = 5.0
"""Seconds between two looks at a pod that has not started for long. Thousands may wait."""
PAGE = "500"
"""Pods in one answer of a list."""
ReadName = Callable[[str], tuple[str, Mapping[str, str]]]
"""Returns a name's token, and what the name says, as labels."""


class PodsEngine:
    """The pods of one namespace of a cluster. Its errors are InfrastructureErrors."""

    def __init__(self, url: str, limits: Limits, read_name: ReadName) -> None:
        """`url` is as in `ClusterAddress`. Raises UsageError if the extra is not installed."""
        try:
            from headrace.services.processes.kubernetes.cluster_client import ClusterClient
        except ImportError as error:
            raise UsageError(
                f"{error.name} is not installed: pip install 'headrace[kubernetes]'"
            ) from None
        address = read_address(url)
        self.host = str(address)
        self.namespace = address.namespace
        self._limits = limits
        self._read_name = read_name
        self._client = ClusterClient(address)
        self._pods = f"/api/v1/namespaces/{address.namespace}/pods"
        self._commands: dict[str, CommandStream | KeptStream] = {}

    async def aclose(self) -> None:
        """Closes its connections. What runs in pods goes on."""
        await self._client.aclose()

    async def info(self) -> Mapping[str, Any]:
        """Returns the version of the API server."""
        return await self._client.call("GET", "/version")

    def policy_user(self, name: str) -> str:
        """Returns the number of the user that runs a sandbox's commands."""
        return str(user_of(self._read_name(name)[0]))

    async def allowed(self, verb: str, resource: str, group: str = "") -> bool:
        """Returns whether the worker may do something in the namespace."""
        kind, _, part = resource.partition("/")
        asked = {"namespace": self.namespace, "verb": verb, "resource": kind, "group": group}
        if part:
            asked["subresource"] = part
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        answer = await self._client.call("POST", path, {"spec": {"resourceAttributes": asked}})
        return bool(answer["status"]["allowed"])

    async def network_policies(self) -> list[Mapping[str, Any]]:
        """Returns the policies of the network in the namespace."""
        path = f"/apis/networking.k8s.io/v1/namespaces/{self.namespace}/networkpolicies"
        return list((await self._client.call("GET", path))["items"])

    async def create(self, name: str, body: Mapping[str, Any], limit_s: float) -> Mapping[str, Any]:
        """Creates a pod, and returns it once it runs. It is removed if that fails.

        Raises InfrastructureError with what the pod waits for if it does not run in `limit_s`.
        """
        made = await self._client.call("POST", self._pods, body)
        if body["spec"].get("hostUsers") is False and made["spec"].get("hostUsers") is not False:
            await self.remove(name)
            raise UsageError(f"{self.host} does not give pods user namespaces (`hostUsers`)")
        try:
            return await self._running(name, limit_s)
        except InfrastructureError:
            await self.remove(name)
            raise

    async def _running(self, name: str, limit_s: float) -> Mapping[str, Any]:
        until, wait_s = time.monotonic() + limit_s, FIRST_POLL_S
        while True:
            pod = await self._pod(name)
            if state_of(pod) == "running":
                return pod
            if why := why_not_started(pod):
                raise InfrastructureError(why[0], f"{self.host}: pod {self._id(name)}: {why[1]}")
            if time.monotonic() > until:
                words = f"it did not start in {limit_s:g} s. It waits: {waits_for(pod)}"
                message = f"{self.host}: pod {self._id(name)}: {words}"
                raise InfrastructureError("pod_not_started", message)
            await asyncio.sleep(wait_s)
            wait_s = min(LONGEST_POLL_S, 1.25 * wait_s)

    async def rename(self, name: str, new: str) -> None:
        """Raises NotThere if the pod is gone, and Conflict if its name is another one."""
        labels = self._read_name(new)[1]
        changes = [(f"/metadata/annotations/{NAME}", new)]
        changes += [(f"/metadata/labels/{key}", label_value(text)) for key, text in labels.items()]
        patch: list[dict[str, Any]] = [{"op": "test", "path": changes[0][0], "value": name}]
        patch += [{"op": "add", "path": path, "value": text} for path, text in changes]
        await self._client.call("PATCH", self._path(name), patch)

    async def containers(
        self, labels: Mapping[str, str], pattern: str = ""
    ) -> list[Mapping[str, Any]]:
        """Returns sandboxes, running or not, by labels and a pattern of names.

        An empty value of a label means any value. Those that are being removed are left out.
        """
        wanted = [f"{key}={label_value(text)}" if text else key for key, text in labels.items()]
        query = {"labelSelector": ",".join(wanted), "limit": PAGE}
        found: list[Mapping[str, Any]] = []
        while True:
            page = await self._client.call("GET", self._pods, None, **query)
            found += (described(pod) for pod in page["items"] if state_of(pod) != "removing")
            query["continue"] = page["metadata"].get("continue", "")
            if not query["continue"]:
                break
        return [each for each in found if re.search(pattern, each["Names"][0])]

    async def remove(self, name: str) -> None:
        """Kills and removes a pod, unless it is already gone."""
        with suppress(NotThere):
            await self._client.call("DELETE", self._path(name))

    async def inspect(self, name: str) -> Mapping[str, Any]:
        """Returns a sandbox's state. Raises NotThere if it is gone, or has another name."""
        pod = await self._named(name)
        return {"State": {"Running": state_of(pod) == "running"}}

    async def out_of_memory(self, name: str) -> bool:
        """Returns whether a sandbox that does not run ended because its memory was used up."""
        return out_of_memory(await self._named(name))

    async def ended(self, name: str) -> None:
        """Waits until a sandbox does not run. The caller bounds the time."""
        while (await self.inspect(name))["State"]["Running"]:
            await asyncio.sleep(POLL_S)

    async def usage(self, name: str) -> tuple[int, int]:
        """Returns zeros: a cluster does not say what a pod uses.

        The processes of a sandbox have a limit of their own, which keeps no command from starting.
        If its memory is used up, the kernel ends its processes.
        """
        return 0, 0

    @asynccontextmanager
    async def run(
        self,
        name: str,
        command: Sequence[str],
        user: str,
        folder: str,
        given: IO[bytes] | None = None,
    ) -> AsyncIterator[tuple[str, CommandStream | KeptStream]]:
        """Begins a command in a sandbox. Yields the command's id and its output.

        It gets the bytes of `given` at its stdin, without an end. For the user KEEPER it runs
        beside the sandbox, and has ended when this yields. Raises NotThere if the sandbox has
        another name, and Conflict if it does not run.
        """
        pod, run_id = await self._named(name), uuid.uuid4().hex
        if state_of(pod) != "running":
            message = f"{self.host}: pod {self._id(name)} is {state_of(pod)}"
            raise Conflict("sandbox_conflict", message)
        try:
            if user == KEEPER:
                stream = self._commands[run_id] = await self._beside(name, pod, command)
                yield run_id, stream
                return
            whole = limited(self._limits, command, folder, reads=given is not None)
            connection = await self._client.open_command(
                f"{self._path(name)}/exec", CONTAINER, whole, stdin=given is not None
            )
            try:
                what = f"{self.host}: pod {self._id(name)}: a command"
                output = self._commands[run_id] = CommandStream(connection, what)
                if given is not None:
                    await output.send(given)
                yield run_id, output
            finally:
                await connection.close()
        finally:
            self._commands.pop(run_id, None)

    async def _beside(
        self, name: str, pod: Mapping[str, Any], command: Sequence[str]
    ) -> KeptStream:
        """Runs a command as the keeper, in an ephemeral container, and returns what it wrote."""
        container = f"keeper-{uuid.uuid4().hex[:12]}"
        made = keeper(container, pod["spec"]["containers"][0]["image"], command)
        path = f"{self._path(name)}/ephemeralcontainers"
        await self._client.call("PATCH", path, {"spec": {"ephemeralContainers": [made]}})
        while True:
            pod = await self._named(name)
            for status in pod["status"].get("ephemeralContainerStatuses", ()):
                if status["name"] == container and (
                    ended := status.get("state", {}).get("terminated")
                ):
                    return KeptStream(ended.get("message", "").encode(), int(ended["exitCode"]))
            if state_of(pod) != "running":
                message = f"{self.host}: pod {self._id(name)} is {state_of(pod)}"
                raise Conflict("sandbox_conflict", message)
            await asyncio.sleep(2 * FIRST_POLL_S)

    async def exit_code(self, command: str) -> int | None:
        """Returns a command's exit code, or None if it still runs.

        Raises NotThere if its connection ended before.
        """
        return self._commands[command].exit_code()

    async def _named(self, name: str) -> Mapping[str, Any]:
        pod = await self._pod(name)
        if pod["metadata"].get("annotations", {}).get(NAME) != name:
            message = f"{self.host}: pod {self._id(name)} is not {name} any more"
            raise NotThere("sandbox_lost", message)
        return pod

    async def _pod(self, name: str) -> Mapping[str, Any]:
        return await self._client.call("GET", self._path(name))

    def _id(self, name: str) -> str:
        return pod_name(self._read_name(name)[0])

    def _path(self, name: str) -> str:
        return f"{self._pods}/{self._id(name)}"
