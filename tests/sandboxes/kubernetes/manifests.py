"""Applies what docs/kubernetes.md asks an operator to apply."""

from __future__ import annotations

import re
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from tests.sandboxes.kubernetes.cluster import NAMESPACE, Cluster

PAGE = Path(__file__).parents[3] / "docs" / "kubernetes.md"
PATHS = {
    "Namespace": "/api/v1/namespaces",
    "Role": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles",
    "RoleBinding": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/rolebindings",
    "NetworkPolicy": f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies",
    "ServiceAccount": f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts",
}


def apply_manifests(made: Cluster) -> None:
    """Applies the page's manifests, and the service account that a controller would make."""
    found = re.search(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    for manifest in (*yaml.safe_load_all(found[1]), account):
        made.call("POST", PATHS[manifest["kind"]], manifest)
