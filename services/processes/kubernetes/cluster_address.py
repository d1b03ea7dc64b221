"""The address of a cluster in a recipe: `kubernetes://CONTEXT/NAMESPACE`."""

from __future__ import annotations

import re
from dataclasses import dataclass

SCHEME = "kubernetes://"
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """A namespace of a cluster, and how the worker finds the cluster."""

    context: str
    """A context of the worker's kubeconfig. Empty means the cluster in which the worker runs as a
    pod, and elsewhere the kubeconfig's current context."""
    namespace: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.context}/{self.namespace}"


def is_cluster(url: str) -> bool:
    """Returns whether a host's address is one of a cluster."""
    return url.startswith(SCHEME)


def read_address(url: str) -> ClusterAddress:
    """Reads an address. Raises ValueError if it is not one of a cluster."""
    # A context may contain slashes, and a namespace may not.
    context, slash, namespace = url.removeprefix(SCHEME).rpartition("/")
    if not is_cluster(url) or not slash or not _NAMESPACE.fullmatch(namespace):
        raise ValueError(
            f"{url!r} is not {SCHEME}CONTEXT/NAMESPACE, with a context that `kubectl config "
            "get-contexts` lists, and a namespace of that cluster. Leave CONTEXT empty for the "
            f"cluster in which the worker runs, or the current context: {SCHEME}/NAMESPACE"
        )
    return ClusterAddress(context, namespace)
