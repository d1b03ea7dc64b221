"""One private cluster for all tests of sandboxes on Kubernetes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.infra.local.detached import locked
from tests.sandboxes.kubernetes.cluster import Cluster, cluster, why_not
from tests.sandboxes.kubernetes.manifests import apply_manifests

LOCK_S = 7200


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster in which the manifests of docs/kubernetes.md are applied."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # all workers use the same programs
        folder = folder.parent
    # One at a time: two kubelets would remove each other's control groups.
    with (
        locked(Path(tempfile.gettempdir()) / "headrace-kubernetes.lock", LOCK_S),
        cluster(tmp_path_factory.mktemp("cluster"), folder / "kubernetes") as running,
    ):
        apply_manifests(running)
        yield running


@pytest.fixture
def engine(made: Cluster, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the cluster's namespace, for a worker that has only its Role."""
    monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig))
    return "kubernetes://worker/sandboxes"
