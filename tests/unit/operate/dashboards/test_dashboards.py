"""What the dashboards, the alert rules and the documents name exists in what services export."""

from __future__ import annotations

import importlib
import json
import re
from functools import cache
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from headrace.services.log.request_signatures import REQUEST_HEADER
from tests.unit.test_architecture import FILES, ROOT

FOLDER = ROOT / "infra/dashboards"
OF_PROMETHEUS = frozenset({"instance", "job", "le"})
"""Labels that Prometheus adds, and that of the buckets of a histogram."""


@cache
def exported() -> dict[str, frozenset[str]]:
    """The labels of each series that any process of Headrace may export, by its name."""
    for name, path in FILES.items():
        if "prometheus_client" in (ROOT / path).read_text():
            importlib.import_module(name)
    found: dict[str, frozenset[str]] = {}
    for collector in {*REGISTRY._names_to_collectors.values()}:
        for family in collector.collect():
            suffixes = {
                "counter": ("_total",),
                "histogram": ("_bucket", "_count", "_sum"),
                "info": ("_info",),
            }.get(family.type, ("",))
            labels = getattr(collector, "_labelnames", ()) or tuple(
                label for sample in family.samples for label in sample.labels
            )
            for suffix in suffixes:
                found[family.name + suffix] = frozenset(labels)
    # Families of a collector that has nothing to count yet, and labels that `info` gives.
    found["headrace_trainer_seconds_total"] = frozenset({"policy", "phase"})
    found["headrace_service_info"] = frozenset({"service", "namespace", "policy"})
    return found


def rules() -> dict[str, str]:
    """The expression of each alert."""
    text = (FOLDER / "alerts.yml").read_text()
    parts = re.split(r"- alert: (\w+)\n", text)[1:]
    names, bodies = parts[::2], parts[1::2]
    return {
        name: body.partition("labels:")[0].partition("for:")[0].partition("expr:")[2]
        for name, body in zip(names, bodies, strict=True)
    }


def panels() -> dict[str, list[str]]:
    """The expressions of each panel of the dashboard."""
    dashboard = json.loads((FOLDER / "grafana.json").read_text())
    return {one["title"]: [t["expr"] for t in one["targets"]] for one in dashboard["panels"]}


EXPRESSIONS = [*rules().items(), *((name, one) for name, of in panels().items() for one in of)]


@pytest.mark.parametrize(("name", "expression"), EXPRESSIONS)
def test_every_metric_and_label_is_exported(name: str, expression: str) -> None:
    metrics = set(re.findall(r"\b(?:headrace|process)_\w+", expression))
    assert metrics or expression.strip().startswith("up{")
    known = exported()
    assert metrics <= known.keys(), name
    for metric, selector in re.findall(r"(\w+)\{([^}]*)\}", expression):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector))
        assert labels <= known.get(metric, frozenset()) | OF_PROMETHEUS, name
    grouped = {
        label.strip()
        for listed in re.findall(r"(?:by|on|ignoring|group_left) \(([^)]*)\)", expression)
        for label in listed.split(",")
    }
    assert grouped <= frozenset().union(*(known[one] for one in metrics)) | OF_PROMETHEUS, name


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    sections = re.findall(r"^## (Headrace\w+)$", (ROOT / "docs/alerts.md").read_text(), re.M)
    assert sections == list(rules())
    text = (FOLDER / "alerts.yml").read_text()
    linked = re.findall(r"runbook: docs/alerts.md#(\w+)", text)
    assert linked == [name.lower() for name in rules()]


def test_the_documents_list_every_metric() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    listed = set(re.findall(r"`(headrace_\w+)`", page)) - {REQUEST_HEADER}
    ours = {name for name in exported() if name.startswith("headrace_")}
    bases = {re.sub(r"_(bucket|count|sum)$", "", name) for name in ours}
    assert bases <= listed
    assert {name for name in listed if not name.startswith("headrace_version")} <= bases | ours


def test_the_panels_do_not_overlap() -> None:
    dashboard = json.loads((Path(FOLDER) / "grafana.json").read_text())
    places = [tuple(one["gridPos"].values()) for one in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert len({one["id"] for one in dashboard["panels"]}) == len(places)
