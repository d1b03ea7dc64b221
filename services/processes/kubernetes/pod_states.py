"""What the status of a pod says, in the words that sandboxes use for containers of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.services.processes.kubernetes.hardened_pod import CONTAINER, NAME

REFUSED = frozenset(
    {
        "ErrImageNeverPull", "InvalidImageName", "ImageInspectError", "CreateContainerConfigError",
        "CreateContainerError", "RunContainerError",
    }
)  # fmt: skip
"""Why a container waits, if waiting longer is no use."""
PULL_FAILED = frozenset({"ErrImageNeverPull", "ImagePullBackOff", "InvalidImageName"})


def state_of(pod: Mapping[str, Any]) -> str:
    """Returns `running`, `created`, `removing` or `exited`."""
    if pod["metadata"].get("deletionTimestamp"):
        return "removing"
    if "running" in _container(pod).get("state", {}):
        return "running"
    return "created" if pod.get("status", {}).get("phase", "Pending") == "Pending" else "exited"


def out_of_memory(pod: Mapping[str, Any]) -> bool:
    """Returns whether the sandbox ended because its own memory was used up.

    A pod that is removed or evicted may have this reason of a process that was killed earlier.
    """
    ended = _container(pod).get("state", {}).get("terminated", {})
    others = pod["status"].get("reason") or state_of(pod) == "removing"
    return ended.get("reason") == "OOMKilled" and not others


def digest_of(pod: Mapping[str, Any]) -> str:
    """Returns the digest of a pod's image, `sha256:…`; empty if it has not started."""
    return str(_container(pod).get("imageID", "")).rpartition("@")[2]


def source_of(pod: Mapping[str, Any]) -> str:
    """Returns how a registry names a pod's image, `repository@sha256:…`; empty if none does."""
    image = str(_container(pod).get("imageID", "")).removeprefix("docker-pullable://")
    return image if "@" in image else ""


def described(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a pod as a Docker engine lists a container."""
    metadata = pod["metadata"]
    annotations = metadata.get("annotations") or {}
    labels = {key: text for key, text in annotations.items() if key.startswith("headrace.")}
    name = labels.pop(NAME, metadata["name"])
    return {
        "Id": metadata["uid"],
        "Names": [name],
        "State": state_of(pod),
        "Labels": {**labels, "headrace.digest": digest_of(pod)},
    }


def why_not_started(pod: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the code and the words of the error of a pod that won't start; None if it may."""
    status, container = pod.get("status", {}), _container(pod)
    waiting = container.get("state", {}).get("waiting", {})
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in PULL_FAILED:
        return "pull_failed", f"{reason}: {message}"
    if reason in REFUSED:
        return "engine_error", f"{reason}: {message}"
    if state_of(pod) in ("exited", "removing"):
        ended = container.get("state", {}).get("terminated", {})
        words = [status.get("reason"), status.get("message"), ended.get("reason")]
        said = ": ".join(str(word) for word in (*words, ended.get("message")) if word)
        return "engine_error", f"it ended before it ran: {said.strip() or 'without a reason'}"
    return None


def waits_for(pod: Mapping[str, Any]) -> str:
    """Returns what a pod that has not started waits for, for errors."""
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}"
    waiting = _container(pod).get("state", {}).get("waiting", {})
    return str(waiting.get("reason") or "no node has begun to start it")


def _container(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    for status in pod.get("status", {}).get("containerStatuses", ()):
        if status.get("name") == CONTAINER:
            return status if isinstance(status, Mapping) else {}
    return {}
