"""Runs the blocks of a page from top to bottom, as a reader would: in one folder and one shell."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.docs.markdown import Block

CHILD = Path(__file__).with_name("page_child.py")
BLOCK_S = 300.0
LONG_S = 900.0
END_S = 10.0
"""Seconds that the processes of a page may take to end after SIGTERM."""
PRINTED = 8_000
"""Most characters of the page's output that an error has."""
SHELL = """\
set -euo pipefail
[ ! -s "$PAGE_STATE" ] || source "$PAGE_STATE"
"""
LEAVES = """\
trap 'declare -px > "$PAGE_STATE"; printf "cd %q\\n" "$PWD" >> "$PAGE_STATE"' EXIT
"""
"""What a block leaves to the next one: exported variables and the folder."""


class BlockFailed(AssertionError):
    """A block of a page failed. The message has its line and what was printed."""


def run_page(
    name: str, blocks: Sequence[Block], folder: Path, variables: Mapping[str, str], *, long: bool
) -> None:
    """Runs a page's blocks in `folder/page`. Raises BlockFailed.

    The blocks get the variables of this process, `headrace` on PATH, and `variables`.
    """
    run = _Run(name, folder, variables)
    with run.ending_processes():
        for block in blocks:
            if block.executed(long=long):
                run.execute(block)


@dataclass
class _Run:
    name: str
    folder: Path
    variables: Mapping[str, str]
    shells: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Each leads a process group of its own."""
    python: tuple[IO[bytes], int] | None = None
    """The child for Python blocks: where it reads them, and where its answers arrive."""

    def __post_init__(self) -> None:
        self.page = self.folder / "page"
        self.page.mkdir(exist_ok=True)
        self.output = (self.folder / "output.txt").open("ab")
        usual = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HEADRACE", "PYTEST", "PYTHON"))
        }
        self.environment = {
            **usual,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{usual['PATH']}",
            "PAGE_STATE": str(self.folder / "state.sh"),
            **self.variables,
        }

    @contextmanager
    def ending_processes(self) -> Iterator[None]:
        """Ends every process that the page has started."""
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                deadline = time.monotonic() + END_S
                for shell in self.shells:
                    _end_group(shell, number, deadline)
            if self.python is not None:
                self.python[0].close()
                os.close(self.python[1])
            self.output.close()

    def execute(self, block: Block) -> None:
        """Executes a block, or writes it to its file."""
        limit_s = LONG_S if block.is_long else BLOCK_S
        if block.file is not None:
            (self._here() / block.file).write_text(block.text)
            return
        error = (self._shell if block.language == "sh" else self._python)(block, limit_s)
        if error is not None:
            printed = (self.folder / "output.txt").read_text(errors="replace")[-PRINTED:]
            raise BlockFailed(f"{self.name}, line {block.line}: {error}\n{block.text}\n{printed}")

    def _shell(self, block: Block, limit_s: float) -> str | None:
        process = self._start(LEAVES + block.text)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"still running after {limit_s:g} s"
        return f"exit code {code}" if code else None

    def _python(self, block: Block, limit_s: float) -> str | None:
        if self.python is None:
            answers, theirs = os.pipe()
            command = f'exec "{sys.executable}" -u "{CHILD}" "{self.name}" {theirs}'
            child = self._start(command, stdin=subprocess.PIPE, pass_fds=(theirs,))
            os.close(theirs)
            assert child.stdin is not None
            self.python = (child.stdin, answers)
        blocks, answers = self.python
        request = {"folder": str(self._here()), "line": block.line, "text": block.text}
        blocks.write(json.dumps(request).encode() + b"\n")
        blocks.flush()
        answer, deadline = b"", time.monotonic() + limit_s
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([answers], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return f"still running after {limit_s:g} s"
            if not (part := os.read(answers, 65_536)):
                return "Python ended"
            answer += part
        error: str | None = json.loads(answer)
        return error

    def _start(
        self, text: str, stdin: int = subprocess.DEVNULL, pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            ["bash", "-c", SHELL + text],
            cwd=self.page, env=self.environment, stdin=stdin, stdout=self.output,
            stderr=subprocess.STDOUT, start_new_session=True, pass_fds=pass_fds,
        )  # fmt: skip
        self.shells.append(process)
        return process

    def _here(self) -> Path:
        """The folder that the last shell block has left."""
        command = ["bash", "-c", f"{SHELL}pwd"]
        done = subprocess.check_output(command, cwd=self.page, env=self.environment, text=True)
        return Path(done.rstrip("\n"))


def _end_group(leader: subprocess.Popen[bytes], number: signal.Signals, deadline: float) -> None:
    """Sends a signal to a process group, and waits until it has ended or the deadline is over."""
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, number)
        while time.monotonic() < deadline:
            leader.poll()
            os.killpg(leader.pid, 0)
            time.sleep(0.05)
