"""Random histories of true and forged records: those of known keys count, and no others.

A world that knows who wrote each record judges what the product's own readers make of them:
publications of a policy with signers, changes of limits, and tasks and cancellations of tenants.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from random import Random

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from headrace.errors import DecodeError
from headrace.schemas.events import Blob, Event, PolicyPublished, QuotaSet, TaskCancelled
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import Topics
from headrace.schemas.untrusted.trusted_keys import TrustedKeys
from headrace.services.kafka.broker import Headers, Outgoing, Record
from headrace.services.log.request_signatures import RequestSignature, RequestSigner, SignedLimits
from headrace.services.log.signatures import HEADER, SignedPublications, public_text, signed_bytes
from headrace.services.scheduler.starts import LOST, UNPROVED
from headrace.services.tasks.cancellation import CancelledTasks
from tests.whole_core import WholeCore

KEYS = {
    name: Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)
    for number, name in enumerate(("team", "other", "operator", "stranger"), start=1)
}
PUBLIC = {name: public_text(key) for name, key in KEYS.items()}
TRUSTED = TrustedKeys({name: (PUBLIC[name],) for name in ("team", "other")}, (PUBLIC["operator"],))
TOPICS = Topics("here", ("default",), 1, signers={"default": (PUBLIC["team"],)}, trusted=TRUSTED)
RECORDS = 12


def violations_of(seed: int) -> list[str]:
    """Plays the histories of a seed. Returns what counts and must not, or the other way round."""
    chance = Random(f"forgeries {seed}")
    return [*_publications(chance), *_limits(chance), *_tasks(chance), *_cancelled(chance)]


def _record(topic: str, offset: int, value: bytes, headers: Headers) -> Record:
    return Record(TOPICS.by_name(topic).all_partitions()[0], offset, 1.0, b"", value, headers)


def _publications(chance: Random) -> Iterator[str]:
    """Of publications those count that the signer wrote here, each above all before it."""
    reader, newest, past = SignedPublications(TOPICS), 0, list[tuple[bytes, Headers, int, bool]]()
    for offset in range(RECORDS):
        event = PolicyPublished(
            policy="default", version=offset, status="trained", digest=bytes(32),
            full=Blob(sha256=bytes(32), size=1), full_version=offset,
        )  # fmt: skip
        value, number = f"version {offset}".encode(), 1 + chance.randrange(100)
        who = chance.choice(["team", "team", "stranger"])
        place = chance.choice(["here", "here", "there"])
        signature = KEYS[who].sign(signed_bytes(f"{place}.policies.v1", number, value))
        text = f"ed25519:{number}:{base64.b64encode(signature).decode()}"
        headers: Headers = [(HEADER, text.encode())]
        true = who == "team" and place == "here"
        if past and chance.random() < 0.3:  # written again
            value, headers, number, true = chance.choice(past)
        past.append((value, headers, number, true))
        counts = true and number > newest
        if counts:
            newest = number
        try:
            reader.check(event, _record("here.policies.v1", offset, value, headers))
            found = True
        except DecodeError:
            found = False
        if found != counts:
            yield f"I5: publication {offset} by {who} {place} counts: {found}, not {counts}"


def _signed(event: Event, topic: str, chance: Random) -> tuple[str, bytes, Headers]:
    """A request by somebody: their name, empty if it is not theirs as it stands here."""
    who = chance.choice([*KEYS, ""])
    value = event.model_dump_json().encode()
    forged = chance.choice(["", "", "", "namespace", "value", "key"])
    signed_topic = f"there.{topic}.v1" if forged == "namespace" else f"here.{topic}.v1"
    record = Outgoing(signed_topic, b"", value + b"x" * (forged == "value"), [])
    headers = RequestSigner(KEYS[who]).sign(record).headers if who else []
    if forged == "key":
        headers = [(name, text.replace(PUBLIC[who].encode(), PUBLIC["team"].encode()))
                   for name, text in headers]  # fmt: skip
    true = not forged or (forged == "key" and who == "team")
    return (who if true else ""), value, headers


def _key(topic: str, offset: int, value: bytes, headers: Headers) -> str:
    signature = RequestSignature.of(_record(topic, offset, value, headers))
    return "" if signature is None else signature.proved(TRUSTED.keys)


def _limits(chance: Random) -> Iterator[str]:
    """Of changes of a limit those of operators count, each later than all before it."""
    reader, newest = SignedLimits(TOPICS), -1
    for offset in range(RECORDS):
        event = QuotaSet(tenant="team", set_at=chance.randrange(20))
        who, value, headers = _signed(event, "quotas", chance)
        counts = who == "operator" and event.set_at > newest
        if counts:
            newest = event.set_at
        record = _record("here.quotas.v1", offset, value, headers)
        try:
            reader.check(event, record, RequestSignature.of(record))
            found = True
        except DecodeError:
            found = False
        if found != counts:
            yield f"I8: quota {offset} by {who or 'nobody'} counts: {found}, not {counts}"


def _tasks(chance: Random) -> Iterator[str]:
    """A task runs if its tenant's key signed it, whatever was written under its id before."""
    core = WholeCore(_recipe())
    core.on_policy("default", 0)
    expected: dict[int, str] = {}
    taken: set[tuple[str, str]] = set()
    for number in range(RECORDS):
        tenant, task_id = chance.choice(["team", "other", "open"]), str(chance.randrange(4))
        task = LOST.model_copy(update={"tenant": tenant, "task_id": task_id, "agent": "default"})
        who, value, headers = _signed(task, "tasks", chance)
        key = _key("here.tasks.v1", number, value, headers)
        if TRUSTED.refusal(tenant, key):
            core.on_forged(number, task)
        else:
            core.on_task(number, task)
        if tenant != "open" and who not in (tenant, "operator"):
            expected[number] = UNPROVED
        else:
            expected[number] = "duplicate" if (tenant, task_id) in taken else ""
            taken.add((tenant, task_id))
    while starts := core.next_start(1.0):
        code = "" if starts[0].verdict is None else starts[0].verdict.code
        number = starts[0].task
        if code != expected[number]:
            yield f"I1: task {number} ends by {code!r}, not {expected[number]!r}"


def _cancelled(chance: Random) -> Iterator[str]:
    """A cancellation counts for the tenants of its key, and for those without keys."""
    cancelled = CancelledTasks(TRUSTED)
    expected: set[tuple[str, str]] = set()
    for number in range(RECORDS):
        event = TaskCancelled(source=LOST.source, task_id=str(number))
        who, value, headers = _signed(event, "cancellations", chance)
        cancelled.add(event, _key("here.cancellations.v1", number, value, headers))
        for tenant in ("team", "other", "open"):
            if tenant == "open" or who in (tenant, "operator"):
                expected.add((tenant, str(number)))
    for tenant in ("team", "other", "open"):
        for number in range(RECORDS):
            task = LOST.model_copy(update={"tenant": tenant, "task_id": str(number)})
            found, should = cancelled.reason(task) is not None, (tenant, str(number)) in expected
            if found != should:
                yield f"I1: task {number} of {tenant} is cancelled: {found}, not {should}"


def _recipe() -> Recipe:
    tree = {
        "name": "here",
        "policies": {"default": {"model": "tiny-llama", "batches": {"groups": 100}}},
        "scheduler": {
            "live_episodes": 1_000,
            "require_reports": False,
            "operators": [PUBLIC["operator"]],
            "tenants": {name: {"keys": [PUBLIC[name]]} for name in ("team", "other")},
        },
    }
    return Recipe.model_validate(tree)
