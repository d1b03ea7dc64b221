"""The view takes the terminal only while it is open."""

from __future__ import annotations

import io

from rich.console import Console

from headrace.services.operate.sft.sft_view import SftStatus, SftView

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def test_the_cursor_is_hidden_only_while_it_is_open() -> None:
    written = io.StringIO()
    view = SftView(SftStatus("made"), Console(file=written, force_terminal=True))
    view.say("before")
    assert HIDE not in written.getvalue()
    view.open()
    assert HIDE in written.getvalue()
    view.close()
    assert written.getvalue().rindex(SHOW) > written.getvalue().rindex(HIDE)
