"""What the redactor finds in texts, and how long that takes."""

from __future__ import annotations

import base64
import contextlib
import html
import io
import json
import sys
import time
import traceback
import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.services.base import redactor
from headrace.services.base.redactor import REDACTOR, Redactor, redact_output

SECRETS = st.text(st.characters(codec="utf-8"), min_size=8, max_size=60).map(lambda s: f"{s}-")
NEIGHBOURS = st.text("abc:{}\n\"'%= é", max_size=20)


@given(secret=SECRETS, before=NEIGHBOURS, after=NEIGHBOURS)
def test_a_secret_is_found_in_all_its_spellings(secret: str, before: str, after: str) -> None:
    one = Redactor()
    assert one.add("KEY", secret)
    text = before + secret + after
    for spelled in (
        text,
        json.dumps(text),
        json.dumps({"a": [text]}, ensure_ascii=False),
        html.escape(text),
        urllib.parse.quote(text, safe=""),
        urllib.parse.quote_plus(text),
    ):
        assert "[secret KEY]" in one.text(spelled)
        assert one.finds(spelled.encode())
    assert secret not in one.text(text)


@given(secret=SECRETS, user=st.text("abcé", max_size=7), after=NEIGHBOURS)
def test_a_secret_is_found_in_base64(secret: str, user: str, after: str) -> None:
    one = Redactor()
    one.add("KEY", secret)
    data = f"{user}:{secret}{after}".encode()
    for encoded in (base64.b64encode(data), base64.urlsafe_b64encode(data)):
        redacted = one.text(f"Authorization: Basic {encoded.decode()}")
        assert "[secret KEY]" in redacted
        left = redacted.removeprefix("Authorization: Basic ").partition("[secret KEY]")
        # What is left can hold less than a byte of each end of the secret.
        assert len(left[0]) <= len(user.encode()) * 4 / 3 + 4
        assert len(left[2]) <= len(after.encode()) * 4 / 3 + 5


def test_parts_that_are_printed_alone_are_found() -> None:
    one = Redactor()
    lines = ["-----BEGIN PRIVATE KEY-----", f"{'x':=^40}", f"{'y':=^40}"]
    one.add("/run/key.pem", "\n".join(lines))
    one.add("URL", "https://user:p%40ssword1234@host/path")
    one.add("ACCOUNT", json.dumps({"type": "service", "key": "first-line-of-key\nsecond-line-key"}))
    assert one.text(f"bad line {lines[1]}") == "bad line [secret /run/key.pem]"
    assert one.text(lines[0]) == lines[0]
    assert one.text("password p@ssword1234 refused") == "password [secret URL] refused"
    assert one.text("key: second-line-key") == "key: second-line-key"  # shorter than a part
    assert one.text("key: first-line-of-key") == "key: [secret ACCOUNT]"
    assert one.text("type: service") == "type: service"


def test_what_other_texts_may_hold_is_not_replaced_and_the_longest_secret_wins() -> None:
    one = Redactor()
    simple = ("short-1", "password", "1234567890")
    for secret in simple:
        assert not one.add("SIMPLE", secret)
        assert one.text(secret) == secret
    assert one.add("LETTERS", "correcthorsebattery")
    one.add("INNER", "inner-12")
    one.add("OUTER", "outer-inner-12")
    assert one.text("inner-12 outer-inner-12") == "[secret INNER] [secret OUTER]"


def test_a_text_is_shortened_after_its_secrets_are_replaced() -> None:
    known, secret = Redactor(), "0123456789-abcdef-42"
    assert known.add("KEY", secret)
    for characters in range(30):
        assert known.text(f"key {secret}", characters) == "key [secret KEY]"[:characters]


def test_a_name_can_break_no_json() -> None:
    one = Redactor()
    one.add('/a"b\\c\n', "canary-1234")
    assert json.loads(one.text('{"x": "canary-1234"}')) == {"x": "[secret /a_b_c_]"}


def test_a_long_text_is_redacted_in_a_moment() -> None:
    one = Redactor()
    for number in range(20):
        end = base64.b64encode(bytes([number] * 24)).decode()
        one.add(f"KEY_{number}", f"sk-{number:02}-/+{end}")
    line = "the secret sk-00-/+AAAA is not whole; sk- sk-0 sk-01 and so on, for a long time\n"
    text = line * (1_000_000 // len(line))
    began = time.perf_counter()
    assert one.text(text) == text
    seconds = time.perf_counter() - began
    print(f"1 MB with 20 secrets: {seconds * 1000:.0f} ms")
    assert seconds < 2.0  # measured: 0.1 s


def test_what_a_process_prints_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redactor, "REDACTOR", one := Redactor())
    one.add("KEY", "print-canary-1234")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO()))
    early = sys.stderr  # a library's logger may hold it
    redact_output()
    redact_output()
    print("it is print-canary-1234", end=";")
    try:
        raise ValueError("print-canary-1234")
    except ValueError:
        traceback.print_exc(file=early)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    assert isinstance(sys.stdout.buffer, io.BytesIO)
    assert isinstance(sys.stderr.buffer, io.BytesIO)
    assert sys.stdout.buffer.getvalue() == b"it is [secret KEY];"
    assert b"ValueError: [secret KEY]" in sys.stderr.buffer.getvalue()
    assert b"canary" not in sys.stderr.buffer.getvalue()
    with contextlib.suppress(KeyError):
        del vars(early)["write"]


def test_a_process_has_one_redactor() -> None:
    assert redactor.REDACTOR is REDACTOR
