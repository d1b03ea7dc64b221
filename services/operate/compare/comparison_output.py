"""Prints a comparison for people."""

from __future__ import annotations

from headrace.schemas.events import PolicyPublished
from headrace.services.operate.compare.comparison import Comparison
from headrace.services.operate.options import echo, print_table
from headrace.services.operate.replay.recording import SHOWN_KEYS
from headrace.services.operate.show.pages import number


def print_comparison(comparison: Comparison) -> None:
    """Prints where the runs differ, their metrics as a table, and what the figures can't show."""
    metrics = comparison.metrics()
    print_table(
        # With spaces, a narrow terminal can divide a title into lines.
        ("version", "run", "weights", *(name.replace("_", " ") for name in metrics)),
        [
            [
                str(version),
                run.namespace,
                _weights(one),
                *(number(one.metrics.get(name)) for name in metrics),
            ]
            for version, run, one in comparison.rows()
        ],
    )
    for run in comparison.others:
        echo(f"{run.namespace}, compared with {comparison.first.namespace}", bold=True)
        for line in comparison.differences(run):
            echo(f"  {line}")
        for line in run.changes[:SHOWN_KEYS]:
            echo(f"  {line}")
        if (more := len(run.changes) - SHOWN_KEYS) > 0:
            echo(f"  … and {more} more keys of the recipe: --json shows them all")
    _print_evaluations(comparison)
    for note in comparison.notes():
        echo(f"note: {note}")


def _weights(version: PolicyPublished) -> str:
    return version.digest.hex()[:8] + (" skipped" if version.status == "skipped" else "")


def _print_evaluations(comparison: Comparison) -> None:
    if not comparison.evaluations:
        return
    echo(f"evaluation of version {comparison.newest_common()}", bold=True)
    for namespace, evaluation in comparison.evaluations.items():
        echo(f"  {namespace}   {evaluation}")
    for run in comparison.others:
        if (difference := comparison.difference(run)) is not None:
            echo(f"  {run.namespace} minus {comparison.first.namespace}, by task   {difference}")
