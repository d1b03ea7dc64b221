"""`dead-letters`: what was no event, and putting it back."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    explain,
    json_option,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from headrace.services.log.event_log import EventLog
    from headrace.services.namespace.run_life import RunLife
    from headrace.services.operate.dead_letters.dead_letters import DeadLetter

SHOWN_BYTES = 512
REASON = 90


@click.group("dead-letters")
def dead_letters() -> None:
    """Look at what was no event, and put it back once it is one.

    Bytes that a consumer can't decode are parked whole in the topic `dead-letters`, and the run
    goes on without them. A letter's number is its offset there.

    \b
    Examples:
      headrace dead-letters list
      headrace dead-letters show 17
      headrace dead-letters retry 17 18
    """


@dead_letters.command("list")
@json_option
@cluster_options
def list_dead_letters(as_json: bool, **options: Any) -> None:
    """Count the letters by topic and reason.

    \b
    Examples:
      headrace dead-letters list
      headrace dead-letters list --json | jq '.[] | select(.retried < .count)'
    """
    import asyncio
    from dataclasses import asdict

    from headrace.services.operate.show.facts import iso

    async def read() -> list[Any]:
        from headrace.services.log.log_reader import Patience
        from headrace.services.operate.dead_letters.dead_letters import list_kinds

        async with _namespace(options) as (log, _):
            return await list_kinds(log, Patience(explain))

    kinds = asyncio.run(read())
    if as_json:
        print_json([{**asdict(kind), "last_at": iso(kind.last_at)} for kind in kinds])
    elif kinds:
        rows = [
            [
                kind.topic,
                str(kind.count),
                str(kind.retried),
                ", ".join(map(str, kind.first)) + ("…" if kind.count > len(kind.first) else ""),
                iso(kind.last_at),
                kind.reason if len(kind.reason) <= REASON else f"{kind.reason[: REASON - 1]}…",
            ]
            for kind in kinds
        ]
        print_table(("topic", "letters", "put back", "numbers", "last", "reason"), rows)
    else:
        explain("no dead letters")


@dead_letters.command("show")
@click.argument("number", type=click.IntRange(min=0))
@json_option
@cluster_options
def show_dead_letter(number: int, as_json: bool, **options: Any) -> None:
    """Show letter NUMBER: where it lay, why it was parked, its bytes, and if it decodes now.

    \b
    Examples:
      headrace dead-letters show 17
      headrace dead-letters show 17 --json | jq -r .value | xxd -r -p > letter.bin
    """
    import asyncio

    from headrace.services.operate.dead_letters.dead_letters import dead_letter_tree

    async def read() -> tuple[DeadLetter, str]:
        from headrace.services.log.log_reader import Patience
        from headrace.services.operate.dead_letters.dead_letters import find_dead_letter, why_not

        async with _namespace(options) as (log, _):
            dead_letter = await find_dead_letter(log, number, Patience(explain))
            return dead_letter, await why_not(log, dead_letter)

    dead_letter, refused = asyncio.run(read())
    if as_json:
        print_json(dead_letter_tree(dead_letter, refused))
    else:
        for line in _lines(dead_letter, refused):
            click.echo(line)


def _lines(dead_letter: DeadLetter, refused: str) -> list[str]:
    from headrace.services.operate.dead_letters.dead_letters import place, text
    from headrace.services.operate.show.facts import iso

    told = {
        "lay at": place(dead_letter.origin),
        "parked": f"{iso(dead_letter.at)} by {dead_letter.reader or '?'}",
        "reason": dead_letter.reason,
        "retry": f"refused: {refused}" if refused else "can be put back",
        "key": _bytes(dead_letter.key),
    }
    told |= {f"header {name}": _bytes(value) for name, value in dead_letter.headers}
    told["value"] = f"{len(dead_letter.value):,} bytes"
    lines = [f"dead letter {dead_letter.number}"]
    lines += [f"  {name:<12} {what}" for name, what in told.items()]
    head = dead_letter.value[:SHOWN_BYTES]
    for at in range(0, len(head), 16):
        row = head[at : at + 16]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"    {at:06x}  {row.hex(' '):<47}  {shown}")
    if len(dead_letter.value) > len(head):
        lines.append(f"    … and {len(dead_letter.value) - len(head):,} more: --json has all")
    elif (whole := text(dead_letter.value)) is not None:
        lines.append(f"  {'text':<12} {whole!r}")
    return lines


def _bytes(data: bytes) -> str:
    from headrace.services.operate.dead_letters.dead_letters import text

    found = text(data)
    return data.hex() if found is None else repr(found)


@dead_letters.command("retry")
@click.argument("numbers", metavar="NUMBER...", nargs=-1, type=click.IntRange(min=0))
@click.option("--all", "every", is_flag=True, help="Every letter that can be put back.")
@json_option
@cluster_options
def redrive_dead_letters(
    numbers: tuple[int, ...], every: bool, as_json: bool, **options: Any
) -> int:
    """Put letters back into their topics, as they were, once they decode.

    Each is put back once, under its own key and headers, with the header `headrace.retry_of`
    naming the letter. Refused, with the reason: what still does not decode, has expired, or lay in
    a topic where a late copy would be wrong. Exits 1 where one that was named is refused.

    \b
    Examples:
      headrace dead-letters retry 17 18
      headrace dead-letters retry --all
    """
    import asyncio

    from headrace.services.operate.dead_letters.dead_letters import place

    if bool(numbers) == every:
        raise click.UsageError("name the letters to put back, or give --all")
    outcomes = asyncio.run(_retry(options, None if every else numbers))
    if as_json:
        print_json([one.to_tree() for one in outcomes])
    else:
        for one in outcomes:
            said = f"refused: {one.refused}" if one.refused else f"put back: {place(one.origin)}"
            click.echo(f"{one.number}\t{said}")
    return 1 if numbers and any(one.refused for one in outcomes) else 0


async def _retry(options: dict[str, Any], numbers: tuple[int, ...] | None) -> list[Any]:
    from headrace.errors import UsageError
    from headrace.services.log.log_reader import Patience
    from headrace.services.operate.dead_letters.dead_letters import retry

    async with _namespace(options) as (log, life):
        if life.state != "started":
            raise UsageError(
                f"the run of {log.topics.namespace} is {life.state}: nothing would read what is "
                "put back"
            )
        return [one async for one in retry(log, numbers, Patience(explain))]


@asynccontextmanager
async def _namespace(options: dict[str, Any]) -> AsyncGenerator[tuple[EventLog, RunLife]]:
    from headrace.services.namespace.lookup import open_namespace

    async with open_namespace(cluster_of(options), "dead-letters") as opened:
        yield opened
