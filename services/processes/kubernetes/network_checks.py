"""Whether the network policies of a namespace deny a sandbox all traffic."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.services.processes.kubernetes.hardened_pod import NETWORK

BOTH = {"Ingress", "Egress"}


def denies_all(policies: Iterable[Mapping[str, Any]], labels: Mapping[str, str]) -> bool:
    """Returns whether pods with these labels get no traffic, if the cluster enforces its policies.

    Policies add up: one must select the pods and name both directions, and none that may select
    them may allow anything. A policy with expressions may select them, and proves nothing.
    """
    denied: set[str] = set()
    for policy in policies:
        spec = policy["spec"]
        selector = spec.get("podSelector") or {}
        wanted = selector.get("matchLabels") or {}
        if any(key in labels and labels[key] != value for key, value in wanted.items()):
            continue
        if spec.get("ingress") or spec.get("egress"):
            return False
        if not selector.get("matchExpressions") and wanted.items() <= labels.items():
            denied |= set(spec.get("policyTypes") or ("Ingress",))
    return denied >= BOTH


def deny_all(namespace: str) -> str:
    """Returns a policy that denies sandboxes without a network all traffic, as JSON."""
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "headrace-no-network", "namespace": namespace},
        "spec": {
            "podSelector": {"matchLabels": {NETWORK: "none"}},
            "policyTypes": sorted(BOTH),
        },
    }
    return json.dumps(policy)
