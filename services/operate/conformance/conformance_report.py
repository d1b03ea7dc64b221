"""Runs the rules of a contract against a plug-in, and says which of them it keeps.

A rule is a name, what is expected, what to do if it does not hold, and a coroutine function that
tries it. That function raises `Violation` with what happened, or `NotChecked` with the reason if
the rule does not apply to this plug-in. Any other exception breaks the rule, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from headrace.errors import HeadraceError, UsageError
from headrace.services.base.concurrency import in_daemon_thread

Verdict = Literal["pass", "fail", "not checked"]
GRACE_S = 2.0
"""Time that a cancelled rule has to end. After it, its thread counts as blocked."""
CLOSE_S = 10.0
"""Time that what all rules share has to end."""
TIMES_TO_EXIT = 8
"""How often a plug-in may exit while its tasks are cancelled."""
LIMIT_S = 60.0
"""Time that a check has, unless its rule says otherwise."""
_MARK = "_rule"
"""The attribute of a check that has what `rule` was given."""
F = TypeVar("F", bound=Callable[..., Any])


class Violation(Exception):
    """A rule does not hold. The message says what happened."""


class NotChecked(Exception):
    """A rule can't be tried with this plug-in. The message says why."""


def require(holds: bool, happened: str) -> None:
    """Raises Violation with what happened, unless the condition holds."""
    if not holds:
        raise Violation(happened)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a contract."""

    name: str
    """In snake_case. It never changes."""
    expected: str
    """What must happen, as a whole sentence."""
    advice: str
    """What to do if it does not."""
    check: Callable[[], Awaitable[None]]
    limit_s: float = LIMIT_S
    """Seconds after which the plug-in counts as hanging."""


def rule(advice: str, *, limit_s: float = LIMIT_S) -> Callable[[F], F]:
    """Makes a method the check of a rule, for `rules_of`.

    The method's name is that of the rule, and its docstring says what must happen.
    """

    def mark(check: F) -> F:
        setattr(check, _MARK, (advice, limit_s))
        return check

    return mark


def rules_of(checks: object) -> list[Rule]:
    """Returns the rules whose checks are methods of an object, in the order of its class."""
    rules = []
    for name, method in vars(type(checks)).items():
        if (mark := getattr(method, _MARK, None)) is not None:
            advice, limit_s = mark
            check = getattr(checks, name)
            expected = " ".join((check.__doc__ or "").split())
            rules.append(Rule(name, expected, advice, check, limit_s))
    return rules


@dataclass(frozen=True, slots=True)
class RuleFinding:
    """What came out of one rule."""

    rule: str
    verdict: Verdict
    expected: str
    happened: str
    """Empty if the rule holds."""
    advice: str
    """Empty unless the rule is broken."""
    seconds: float


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """All findings about one plug-in."""

    kind: str
    """`engine`, `environment`, `agent` or `trainer`."""
    plug_in: str
    """As it was named on the command line."""
    findings: tuple[RuleFinding, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the rules that do not hold."""
        return tuple(one.rule for one in self.findings if one.verdict == "fail")

    def as_json(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        findings = [asdict(one) for one in self.findings]
        return {
            "kind": self.kind, "plug_in": self.plug_in, "ok": not self.failed, "rules": findings,
        }  # fmt: skip

    def lines(self) -> list[str]:
        """Returns the report as lines for a terminal."""
        lines = []
        for one in self.findings:
            lines.append(f"{one.verdict:<11}  {one.rule}")
            if one.verdict == "not checked":
                lines.append(f"    reason:   {one.happened}")
            elif one.verdict == "fail":
                lines.append(f"    expected: {one.expected}")
                lines.append(f"    happened: {one.happened}")
                lines.append(f"    to do:    {one.advice}")
        count = {verdict: 0 for verdict in ("pass", "fail", "not checked")}
        for one in self.findings:
            count[one.verdict] += 1
        lines.append(
            f"{self.kind} {self.plug_in}: {count['pass']} rules hold, {count['fail']} do not, "
            f"{count['not checked']} were not checked"
        )
        return lines


def chosen(rules: Sequence[Rule], names: Collection[str]) -> list[Rule]:
    """Returns the rules with these names, or all if there are no names.

    Raises UsageError if a name is not that of a rule.
    """
    known = [rule.name for rule in rules]
    if unknown := sorted(set(names) - set(known)):
        raise UsageError(f"no rule {unknown[0]!r}. The rules are {', '.join(known)}")
    return [rule for rule in rules if not names or rule.name in names]


def check_rules(
    kind: str,
    plug_in: str,
    rules: Sequence[Rule],
    close: Callable[[], Coroutine[Any, Any, None]] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> ConformanceReport:
    """Tries the rules in their order, in one asyncio loop that no blocking call can stop.

    A rule that takes longer than its `limit_s` is cancelled and broken. If it can't be cancelled
    because the plug-in blocks the loop, the rules after it are not checked. `close` ends what all
    rules shared. `say` gets a line before each rule, because a rule may take minutes. Blocks.
    """
    loop = asyncio.new_event_loop()
    running = in_daemon_thread(partial(_serve, loop), f"conformance-{kind}")
    findings: list[RuleFinding] = []
    blocked = ""
    for rule in rules:
        if blocked:
            findings.append(RuleFinding(rule.name, "not checked", rule.expected, blocked, "", 0.0))
            continue
        say(f"trying {rule.name}")
        finding, ended = _try(loop, running, rule)
        findings.append(finding)
        if not ended:
            blocked = f"after the rule {rule.name} nothing runs in the asyncio loop"
    if close is not None and not blocked and not running.done():
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(close(), loop).result(CLOSE_S)
    if not running.done():
        loop.call_soon_threadsafe(loop.stop)
    if not blocked:
        running.result(GRACE_S)
    return ConformanceReport(kind, plug_in, tuple(findings))


def _try(
    loop: asyncio.AbstractEventLoop, running: Future[None], rule: Rule
) -> tuple[RuleFinding, bool]:
    """Tries one rule. Returns the finding, and whether the loop is free again."""
    began = time.monotonic()
    future = asyncio.run_coroutine_threadsafe(_limited(rule), loop)
    verdict: Verdict = "pass"
    happened, ended = "", True
    try:
        wait((future, running), rule.limit_s + GRACE_S, FIRST_COMPLETED)
        if future.cancelled():  # by the plug-in, or because the loop has ended
            wait((running,), GRACE_S)
        if running.done():  # asyncio lets nothing else end a loop
            running.result()
        future.result(0)
    except NotChecked as reason:
        verdict, happened = "not checked", str(reason)
    except TimeoutError as error:
        verdict, ended = "fail", _free(loop)
        happened = f"it did not return within {rule.limit_s:g} s"
        if time.monotonic() - began < rule.limit_s:
            happened = f"it raised TimeoutError: {error}"
        if not ended:
            happened += ", and blocks the asyncio loop"
    except Violation as violation:
        verdict, happened = "fail", str(violation)
    except HeadraceError as error:
        verdict, happened = "fail", f"it raised {type(error).__name__}: {error}"
    except BaseException as error:  # a user's own code may raise anything, and exit
        if isinstance(error, KeyboardInterrupt):
            raise
        verdict, happened = "fail", f"it raised {type(error).__name__}: {error}"
        if isinstance(error, SystemExit):  # It ends the loop, too.
            wait((running,), GRACE_S)
        ended = not running.done()
    advice = rule.advice if verdict == "fail" else ""
    took = round(time.monotonic() - began, 3)
    return RuleFinding(rule.name, verdict, rule.expected, happened, advice, took), ended


async def _limited(rule: Rule) -> None:
    async with asyncio.timeout(rule.limit_s):
        await rule.check()


def _free(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the loop still does something within GRACE_S."""
    done: Future[None] = Future()
    loop.call_soon_threadsafe(done.set_result, None)
    try:
        done.result(GRACE_S)
    except TimeoutError:
        return False
    return True


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Runs the loop until it is stopped or a plug-in exits, then ends what is left in it."""
    try:
        loop.run_forever()
    finally:
        for _ in range(TIMES_TO_EXIT):
            with suppress(SystemExit):
                loop.run_until_complete(_cancel_all())
                break
        loop.close()


async def _cancel_all() -> None:
    """Cancels what a plug-in left behind in the loop."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=GRACE_S / 2)
    await asyncio.get_running_loop().shutdown_asyncgens()
