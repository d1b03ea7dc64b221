"""What an engine must enforce before a container of a recipe runs on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from headrace.errors import UsageError
from headrace.services.processes.docker.ceilings import VARIABLE, Ceilings

ENFORCED = ("MemoryLimit", "PidsLimit", "CpuCfsQuota")
"""Limits that an engine must support. If it doesn't, its own API only gives a warning."""
FILTERED = frozenset({"runc", "crun"})
"""Programs that apply the seccomp filter that the engine gives to each container."""
ISOLATING = frozenset({"runsc"})
"""Programs that need no filter: the container does not call the host's kernel."""
DESCRIPTION = frozenset({"path", "runtimeArgs", "status"})
"""What the engine says of a runtime whose program we can judge."""


def require_engine(info: Mapping[str, Any], runtime: str, ceilings: Ceilings, whose: str) -> str:
    """Raises UsageError unless an engine enforces the limits and isolates containers.

    `info` is the engine's description of itself, and `runtime` the one that the recipe names, if
    any. Returns what isolates containers, for the log.
    """
    missing = [limit for limit in ENFORCED if not info.get(limit)]
    if missing:
        raise UsageError(f"the Docker engine's kernel can't enforce: {', '.join(missing)}")
    security = _security(info)
    profile = security.get("seccomp", {}).get("profile", "unnamed")
    filtered = "seccomp" in security and profile != "unconfined"
    namespaces = next((name for name in ("rootless", "userns") if name in security), "")
    if ceilings.require_user_namespaces and not namespaces:
        raise ceilings.refusal(
            whose,
            "a Docker engine without user namespaces",
            "require_user_namespaces = true",
            "Start the engine with `userns-remap`, or rootless",
        )
    default = str(info.get("DefaultRuntime") or "runc")
    name = runtime or default
    if _needs_filter(info.get("Runtimes") or {}, name, default, ceilings) and not filtered:
        raise UsageError(
            f"the Docker engine has no seccomp filter, which its runtime {name!r} needs: set one, "
            "or runtime = 'runsc'"
        )
    ceilings.require_runtime(name, whose)
    return (
        f"runtime {name}, seccomp filter {profile if filtered else 'none'}, "
        f"user namespaces {namespaces or 'none'}"
    )


def _security(info: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Returns the engine's security options by name: `name=seccomp,profile=default`."""
    options = {}
    for text in info.get("SecurityOptions") or ():
        parts = dict(part.partition("=")[::2] for part in str(text).split(","))
        options[parts.get("name", "")] = parts
    return options


def _needs_filter(
    runtimes: Mapping[str, Mapping[str, Any]], name: str, default: str, ceilings: Ceilings
) -> bool:
    """Returns whether a runtime isolates only with the engine's seccomp filter.

    Raises UsageError if the engine does not have it, or if nothing says that it applies the filter.
    """
    if name not in runtimes and name != default:
        have = ", ".join(sorted(runtimes))
        raise UsageError(f"the Docker engine has no runtime {name!r}; it has {have}")
    if name in ceilings.trusted_runtimes:
        return False
    found = {key: value for key, value in (runtimes.get(name) or {}).items() if value}
    plain = not found.get("runtimeArgs") and set(found) <= DESCRIPTION
    program = PurePosixPath(str(found.get("path", ""))).name
    if plain and program in ISOLATING:
        return False
    if name == default or (plain and program in FILTERED):
        return True
    raise UsageError(
        f"the Docker engine's runtime {name!r} is {_described(found)}. Headrace can't tell whether "
        f"that applies the seccomp filter: it knows {', '.join(sorted(FILTERED | ISOLATING))} "
        "without arguments. If it isolates, the operator of this host lists it in "
        f"trusted_runtimes, in the file that {VARIABLE} names"
    )


def _described(found: Mapping[str, Any]) -> str:
    program = [str(found.get("path") or found.get("runtimeType") or "of an unknown program")]
    rest = sorted(set(found) - DESCRIPTION - {"runtimeType"})
    options = [f"(with {', '.join(rest)})"] if rest else []
    return " ".join([*program, *map(str, found.get("runtimeArgs") or ()), *options])
