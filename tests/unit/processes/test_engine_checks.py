"""What an engine must enforce, by its own description of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.services.processes.docker.ceilings import Ceilings
from headrace.services.processes.docker.engine_checks import require_engine
from headrace.services.processes.docker.hardened import Limits, container

FILTER = "name=seccomp,profile=default"
RUNTIMES: Mapping[str, Any] = {
    "runc": {"path": "runc"},
    "io.containerd.runc.v2": {"path": "runc", "status": {"features": "{}"}},
    "crun": {"path": "/usr/bin/crun", "runtimeArgs": []},
    "debug": {"path": "/usr/bin/runc", "runtimeArgs": ["--debug"]},
    "runsc": {"path": "/usr/local/bin/runsc"},
    "gvisor": {"path": "/usr/local/bin/runsc"},
    "open-runsc": {"path": "/usr/local/bin/runsc", "runtimeArgs": ["--network=host"]},
    "shim": {"runtimeType": "io.containerd.runsc.v1", "options": {"ConfigPath": "/x"}},
    "mine": {"path": "/opt/mine"},
}


def info(*security: str, default: str = "runc", **changes: Any) -> dict[str, Any]:
    return {
        "MemoryLimit": True,
        "PidsLimit": True,
        "CpuCfsQuota": True,
        "SecurityOptions": ["name=apparmor", *security],
        "DefaultRuntime": default,
        "Runtimes": RUNTIMES,
        **changes,
    }


def check(described: Mapping[str, Any], runtime: str = "", **ceilings: Any) -> str:
    return require_engine(described, runtime, Ceilings(**ceilings), "here")


@pytest.mark.parametrize("runtime", ["", "runc", "io.containerd.runc.v2", "crun"])
@pytest.mark.parametrize("security", [(), ("name=seccomp,profile=unconfined",)])
def test_a_runtime_of_the_hosts_kernel_needs_the_filter(
    runtime: str, security: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError, match="no seccomp filter"):
        check(info(*security), runtime)
    for given in (FILTER, "name=seccomp,profile=builtin", "name=seccomp"):
        assert "seccomp filter none" not in check(info(given), runtime)


@pytest.mark.parametrize("runtime", ["runsc", "gvisor"])
def test_gvisor_isolates_by_itself(runtime: str) -> None:
    assert f"runtime {runtime}, seccomp filter none" in check(info(), runtime)
    assert f"runtime {runtime}" in check(info(default=runtime))


@pytest.mark.parametrize(
    ("runtime", "named"),
    [
        ("mine", "/opt/mine"),
        ("debug", "runc --debug"),
        ("open-runsc", "runsc --network=host"),
        ("shim", r"io.containerd.runsc.v1 \(with options\)"),
    ],
)
@pytest.mark.parametrize("security", [(), (FILTER,)])
def test_an_unknown_runtime_is_trusted_only_if_the_operator_says_so(
    runtime: str, named: str, security: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError, match=rf"{named}\. .*trusted_runtimes"):
        check(info(*security), runtime)
    assert f"runtime {runtime}" in check(info(*security), runtime, trusted_runtimes=[runtime])
    with pytest.raises(UsageError, match="no runtime 'kata'"):
        check(info(*security), "kata", trusted_runtimes=["kata"])


def test_the_engines_own_default_is_its_operators_choice_and_needs_the_filter() -> None:
    assert "runtime mine" in check(info(FILTER, default="mine"))
    with pytest.raises(UsageError, match="no seccomp filter, which its runtime 'mine' needs"):
        check(info(default="mine"), "mine")


def test_a_ceiling_of_runtimes_covers_the_default() -> None:
    assert check(info(FILTER), "runsc", runtimes=["runsc"])
    with pytest.raises(UsageError, match=r"here: runtime 'runc' .* runtimes = \['runsc'\]"):
        check(info(FILTER), runtimes=["runsc"])


@pytest.mark.parametrize("kind", ["userns", "rootless"])
def test_user_namespaces_are_reported_and_may_be_required(kind: str) -> None:
    assert "user namespaces none" in check(info(FILTER))
    assert f"user namespaces {kind}" in check(
        info(FILTER, f"name={kind}"), require_user_namespaces=True
    )
    with pytest.raises(UsageError, match=r"require_user_namespaces = true.*userns-remap"):
        check(info(FILTER), require_user_namespaces=True)
    assert "UsernsMode" not in container(Limits(), "i", {}, 1)["HostConfig"]


def test_an_engine_that_cannot_limit_is_refused() -> None:
    with pytest.raises(UsageError, match="can't enforce: PidsLimit"):
        check(info(FILTER, PidsLimit=False))
