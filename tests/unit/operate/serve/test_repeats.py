from __future__ import annotations

import logging

import pytest

from headrace.services.operate.serve.repeats import Repeats

AGAIN = "the same traceback as before"


def raise_it(number: int) -> None:
    raise ValueError(f"no {number}")


def test_a_traceback_is_logged_once_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("test-repeats")
    logger.addFilter(Repeats())
    for number in range(120):
        try:
            raise_it(number)
        except ValueError:
            logger.exception("task %d failed", number)
    logger.error("task %d failed", 7)
    try:
        raise_it(1)
    except ValueError:
        logger.exception("other")

    assert [(record.getMessage(), bool(record.exc_info)) for record in caplog.records] == [
        ("task 0 failed", True),
        (f"task 9 failed: ValueError: no 9 ({AGAIN}; 10 times in all)", False),
        (f"task 99 failed: ValueError: no 99 ({AGAIN}; 100 times in all)", False),
        ("task 7 failed", False),
        ("other", True),
    ]  # fmt: skip
