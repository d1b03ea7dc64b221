"""The command `audit`: lists who did what to a run, and what of it is proved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.services.operate.options import (
    cluster_options,
    in_namespace,
    json_option,
    print_json,
    print_table,
    say,
)

if TYPE_CHECKING:
    from headrace.services.log.event_log import EventLog
    from headrace.services.namespace.run_life import RunLife
    from headrace.services.operate.audit.audit_entries import AuditEntry

MOST_CELL = 60
"""At most so many characters of a cell are shown without --json."""


@click.command()
@click.option(
    "--operation", "operations", multiple=True, metavar="NAME",
    type=click.Choice(["apply", "end", "ended", "submit", "cancel", "quota", "redrive", "prune"]),
    help="Only this operation: apply, end, ended, submit, cancel, quota, redrive or prune. "
    "Repeatable.",
)  # fmt: skip
@click.option(
    "--last", type=click.IntRange(1, 10_000), default=50, show_default=True, metavar="NUMBER",
    help="How many of the newest entries are listed.",
)  # fmt: skip
@json_option
@cluster_options
def audit(operations: tuple[str, ...], last: int, as_json: bool, **options: Any) -> None:
    """List who submitted, cancelled, redrove, pruned and changed limits.

    Each entry says who did it. `proved` means that the record has a valid signature: the end of the
    key is shown, and who has it by the recipe. `claimed` means that the record only says so:
    whoever may write the topic could have written that. To sign what you do, make a key with
    `headrace keys new FILE`, set HEADRACE_REQUEST_KEY to FILE, and name the public key in the
    recipe (`scheduler.operators`, or `keys` of a tenant).

    Submissions of one submitter in a row are one entry. The column `refused` says why a request
    does not count. Submissions and cancellations are read from their own topics. `quota` and
    `prune` write into `audit` before they change anything, and `redrive` in one transaction with
    the record. A namespace that `prune --forget` removes takes its trail with it. That it was
    removed is recorded in another namespace, if one stays.

    \b
    Examples:
      headrace audit
      headrace audit --operation cancel --operation submit --last 500
      headrace audit --json | jq 'select(.refused != "")'
    """
    from headrace.services.operate.readable import iso

    async def read(log: EventLog, _: RunLife) -> list[AuditEntry]:
        return await _read(log, operations, last)

    entries = in_namespace(options, "audit", read)
    if as_json:
        for one in entries:
            print_json({**one.to_tree(), "at": iso(one.at)}, indent=None)
    elif entries:
        rows = [
            [iso(one.at), one.operation, _short(one.what), _short(one.who), _short(one.details),
             _short(one.refused)]
            for one in entries
        ]  # fmt: skip
        print_table(("time", "operation", "object", "who", "details", "refused"), rows)
    else:
        say("nothing is recorded")


async def _read(log: EventLog, operations: tuple[str, ...], last: int) -> list[AuditEntry]:
    """Reads the topics that have these operations, or all if none is named."""
    from contextlib import aclosing, suppress

    from headrace.errors import DecodeError
    from headrace.schemas.topics import AUDIT, CANCELLATIONS, RUNS, TASKS
    from headrace.services.log.log_reader import WHOLE, Patience, read_records
    from headrace.services.operate.audit.audit_entries import AuditList

    existing = await log.broker.list_topics()
    partitions = [log.topics.partition(topic) for topic in (RUNS, TASKS, CANCELLATIONS, AUDIT)]
    found = AuditList(log.topics.trusted, last, operations)
    whole = {one: WHOLE for one in partitions if one.topic in existing}
    async with aclosing(read_records(log.broker, whole, Patience(say))) as records:
        async for record in records:
            with suppress(DecodeError):  # `headrace dead-letters` lists it.
                source = next((text for name, text in record.headers if name == "ce_source"), b"")
                found.add(await log.decode(record), source.decode(errors="replace"))
    return list(found.entries())


def _short(text: str) -> str:
    return text if len(text) <= MOST_CELL else f"{text[: MOST_CELL - 1]}…"
