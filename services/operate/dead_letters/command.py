"""The command `dead-letters`: shows records that could not be decoded, and redrives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.errors import UsageError
from headrace.services.operate.options import (
    cluster_options,
    echo,
    in_namespace,
    json_option,
    print_json,
    print_table,
    say,
)

if TYPE_CHECKING:
    from headrace.services.log.event_log import EventLog
    from headrace.services.namespace.run_life import RunLife
    from headrace.services.operate.dead_letters.dead_letters import DeadLetter

SHOWN_BYTES = 512
"""Most bytes of a value that are shown without --json."""
REASON = 90
"""Most characters of a reason in the list."""


@click.group("dead-letters")
def dead_letters() -> None:
    """Show records that could not be decoded, and redrive them.

    If a consumer can't decode a record, it writes the whole record to the topic `dead-letters`, and
    the run continues without it. To redrive a dead letter is to write it back into its topic once
    it decodes. A dead letter's number is its offset in `dead-letters`.

    \b
    Examples:
      headrace dead-letters list
      headrace dead-letters show 17
      headrace dead-letters redrive 17 18
    """


@dead_letters.command("list")
@json_option
@cluster_options
def list_dead_letters(as_json: bool, **options: Any) -> None:
    """Count the dead letters by topic and reason.

    \b
    Examples:
      headrace dead-letters list
      headrace dead-letters list --json | jq '.[] | select(.redriven < .count)'
    """
    from dataclasses import asdict

    from headrace.services.log.log_reader import Patience
    from headrace.services.operate.dead_letters.dead_letters import list_kinds
    from headrace.services.operate.readable import iso

    kinds = in_namespace(options, "dead-letters", lambda log, _: list_kinds(log, Patience(say)))
    if as_json:
        print_json([{**asdict(kind), "last_at": iso(kind.last_at)} for kind in kinds])
    elif kinds:
        rows = [
            [
                kind.topic,
                str(kind.count),
                str(kind.redriven),
                ", ".join(map(str, kind.first)) + ("…" if kind.count > len(kind.first) else ""),
                iso(kind.last_at),
                kind.reason if len(kind.reason) <= REASON else f"{kind.reason[: REASON - 1]}…",
            ]
            for kind in kinds
        ]
        print_table(("topic", "count", "redriven", "numbers", "newest", "reason"), rows)
    else:
        say("there are no dead letters")


@dead_letters.command("show")
@click.argument("number", type=click.IntRange(min=0))
@json_option
@cluster_options
def show_dead_letter(number: int, as_json: bool, **options: Any) -> None:
    """Show dead letter NUMBER: its origin, the reason, its bytes, and whether it decodes now.

    \b
    Examples:
      headrace dead-letters show 17
      headrace dead-letters show 17 --json | jq -r .value | xxd -r -p > dead-letter.bin
    """
    from headrace.services.operate.dead_letters.dead_letters import (
        find_dead_letter,
        find_original,
        refusal,
    )

    async def read(log: EventLog, _: RunLife) -> tuple[DeadLetter, str]:
        found = await find_dead_letter(log, number)
        return found, await refusal(log, found, await find_original(log, found))

    dead_letter, refused = in_namespace(options, "dead-letters", read)
    if as_json:
        print_json(dead_letter.to_tree(refused))
    else:
        for line in _lines(dead_letter, refused):
            echo(line)


def _lines(dead_letter: DeadLetter, refused: str) -> list[str]:
    from headrace.services.operate.dead_letters.dead_letters import text
    from headrace.services.operate.readable import iso

    facts = {
        "from": dead_letter.location,
        "written": f"{iso(dead_letter.at)} by {dead_letter.reader or '?'}",
        "reason": dead_letter.reason,
        "redrive": f"refused: {refused}" if refused else "possible",
        "key": _bytes(dead_letter.key),
    }
    facts |= {f"header {name}": _bytes(value) for name, value in dead_letter.headers}
    facts["value"] = f"{len(dead_letter.value):,} bytes"
    lines = [f"dead letter {dead_letter.number}"]
    lines += [f"  {name:<12} {fact}" for name, fact in facts.items()]
    head = dead_letter.value[:SHOWN_BYTES]
    for at in range(0, len(head), 16):
        row = head[at : at + 16]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"    {at:06x}  {row.hex(' '):<47}  {shown}")
    if len(dead_letter.value) > len(head):
        lines.append(f"    … and {len(dead_letter.value) - len(head):,} more: --json shows all")
    elif (whole := text(dead_letter.value)) is not None:
        lines.append(f"  {'text':<12} {whole!r}")
    return lines


def _bytes(data: bytes) -> str:
    from headrace.services.operate.dead_letters.dead_letters import text

    found = text(data)
    return data.hex() if found is None else repr(found)


@dead_letters.command("redrive")
@click.argument("numbers", metavar="NUMBER...", nargs=-1, type=click.IntRange(min=0))
@click.option("--all", "every", is_flag=True, help="Redrive every dead letter that can be.")
@json_option
@cluster_options
def redrive_dead_letters(
    numbers: tuple[int, ...], every: bool, as_json: bool, **options: Any
) -> int:
    """Write dead letters back into their topics, once they decode.

    Each is written back once, with its own key and headers, and with the header `headrace.retry_of`
    that names the dead letter. A dead letter is refused, with the reason, if it still does not
    decode, has expired, or comes from a topic in which a late copy would be wrong. Exits 1 if one
    of the named dead letters is refused.

    \b
    Examples:
      headrace dead-letters redrive 17 18
      headrace dead-letters redrive --all
    """
    from headrace.services.log.log_reader import Patience
    from headrace.services.operate.dead_letters.dead_letters import redrive

    if bool(numbers) == every:
        raise click.UsageError("give the numbers of the dead letters to redrive, or --all")

    async def work(log: EventLog, life: RunLife) -> list[tuple[DeadLetter, str]]:
        if life.state != "started":
            raise UsageError(
                f"the run of {log.topics.namespace} is {life.state}, so no service would read a "
                "redriven record"
            )
        chosen = None if every else numbers
        return [one async for one in redrive(log, chosen, Patience(say))]

    results = in_namespace(options, "dead-letters", work, writing=True, role="redrive")
    if as_json:
        print_json(
            [
                {"number": one.number, "from": one.location, "refused": refused}
                for one, refused in results
            ]
        )
    else:
        for one, refused in results:
            result = f"refused: {refused}" if refused else f"redriven: {one.location}"
            echo(f"{one.number}\t{result}")
    return 1 if numbers and any(refused for _, refused in results) else 0
