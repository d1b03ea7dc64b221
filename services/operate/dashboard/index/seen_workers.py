"""The workers and sandboxes of a run, by what they recorded last. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from headrace.schemas.events import InstanceStateEntered, LoadReported
from headrace.services.worker.worker_loads import LONGEST_S, SUSPECT_AFTER

MOST_WORKERS = 5_000
MOST_SANDBOXES = 10_000
"""Instances of each kind that are kept. The one that was heard of longest ago is forgotten."""
GONE_S = 3_600.0
"""A worker that ended so long ago is not shown."""
UNKNOWN_S = 120.0
"""A worker whose life is not repeated is shown as alive for so long."""


class SeenWorkers:
    """Folds `instances` and `loads`. All times are in seconds since the epoch."""

    def __init__(self) -> None:
        self._lives: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._sandboxes: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._loads: OrderedDict[str, tuple[LoadReported, float]] = OrderedDict()

    def on_instance(self, event: InstanceStateEntered, at: float) -> None:
        """Adds a state of a worker or a sandbox."""
        sandbox = event.kind == "sandbox"
        rows, most = (self._sandboxes, MOST_SANDBOXES) if sandbox else (self._lives, MOST_WORKERS)
        known = rows.pop(event.instance, None)
        same = known is not None and known["state"] == event.state
        if sandbox and event.state in ("gone", "failed"):
            return
        rows[event.instance] = {
            "worker": event.worker,
            "service": event.service or (known or {}).get("service", ""),
            "policy": event.policy,
            "host": event.host,
            "state": event.state,
            "since": known["since"] if known is not None and same else at,
            "began_at": (event.began_at / 1000) or (known or {}).get("began_at", at),
            "seen_at": at,
            "every_s": event.every_ms / 1000,
            "reason": event.reason[:1_000],
        }
        if len(rows) > most:
            rows.popitem(last=False)

    def on_load(self, event: LoadReported, at: float) -> None:
        """Adds a report of a worker. It replaces the one before."""
        self._loads.pop(event.worker, None)
        self._loads[event.worker] = (event, at)
        if len(self._loads) > MOST_WORKERS:
            self._loads.popitem(last=False)

    def workers(self, now: float) -> list[dict[str, Any]]:
        """Returns the workers that live or have ended lately, as JSON values."""
        found = []
        for name in dict.fromkeys([*self._lives, *self._loads]):
            row = self._worker(name, now)
            if row["alive"] or row["seen_at"] > now - GONE_S:
                found.append(row)
        return sorted(found, key=lambda row: (not row["alive"], row["service"], row["worker"]))

    def sandboxes(self, now: float) -> list[dict[str, Any]]:
        """Returns the sandboxes, the oldest first, as JSON values."""
        names = ("worker", "host", "state", "since", "reason")
        rows = [
            {"instance": instance, **{name: row[name] for name in names}}
            | {"age_s": max(0.0, now - row["began_at"])}
            for instance, row in self._sandboxes.items()
        ]
        return sorted(rows, key=lambda row: -float(row["age_s"]))

    def _worker(self, name: str, now: float) -> dict[str, Any]:
        life = self._lives.get(name, {})
        report, at = self._loads.get(name, (None, 0.0))
        ended = life.get("state") in ("gone", "failed")
        every_s = life.get("every_s") or 0.0
        due_s = every_s + 60.0 if every_s else UNKNOWN_S
        quiet_s = SUSPECT_AFTER * min(report.every_ms / 1000, LONGEST_S) if report else 0.0
        silent = report is not None and now > at + quiet_s
        seen_at = max(life.get("seen_at", 0.0), at)
        reports = report is not None and not report.leaving
        alive = not ended and (now - life.get("seen_at", 0.0) <= due_s or (reports and not silent))
        service = "inference" if report and report.pools else "env" if report else ""
        return {
            "worker": name,
            "service": life.get("service") or service,
            "policy": life.get("policy", ""),
            "host": life.get("host", ""),
            "state": life.get("state", "ready"),
            "since": life.get("began_at") or life.get("since") or at,
            "seen_at": seen_at,
            "alive": alive,
            "suspected": alive and silent,
            "leaving": bool(report and report.leaving),
            "reason": life.get("reason", ""),
            "pools": [
                {
                    "policy": one.policy,
                    "slots": one.slots,
                    "busy": one.busy,
                    "waiting": one.waiting,
                    "seconds": one.run_ms / 1000,
                    "version": one.version,
                }
                for one in (report.pools if report else ())
            ],
            "environments": [
                {
                    "environment": one.environment,
                    "slots": one.slots,
                    "busy": one.busy,
                    "waiting": one.waiting,
                    "seconds": one.run_ms / 1000,
                    "open_seconds": one.open_ms / 1000,
                }
                for one in (report.environments if report else ())
            ],
        }
