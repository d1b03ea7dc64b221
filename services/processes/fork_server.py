"""Imports the packages of a Python program once, then forks a process for each of its attempts.

It is started as `python FLAGS fork_server.py CHANNEL COMMAND...`, with the interpreter and the
flags of COMMAND. CHANNEL is a socket (SOCK_SEQPACKET, inherited). The first message is the setup.
Each further message is empty but for five descriptors, and asks for one process. Three of them
become its stdin, stdout and stderr. The others are the lifeline of its guard, and a socket that
brings the variables of the attempt, and takes the guard's pid and the exit code.

In a forked process everything is as if COMMAND had been started. Its own files are read after the
fork. Variables that only attempts have are never in the memory of the fork server.

A fork copies only the thread that forks, and shares open files. So no import may leave a thread, a
process or an open file behind, or read a variable that only attempts have. If one does, the fork
server says so and ends. It needs only a standard library of Python 3.9 or newer.
"""

from __future__ import annotations

import builtins
import ctypes  # noqa: F401
import gc
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
import types
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from headrace.services.processes import guard, imports_ahead
else:

    def _beside(name: str) -> types.ModuleType:
        """Imports a module of this folder, of which the program's own modules must see nothing."""
        path = os.path.join(os.path.dirname(__file__), f"{name}.py")
        spec = importlib.util.spec_from_file_location(f"headrace_{name}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    guard, imports_ahead = _beside("guard"), _beside("imports_ahead")

MESSAGE_BYTES = 65_536
DESCRIPTORS = 5
ALL = "*"
"""Stands for all variables, if something copies or lists the environment."""
PREFIXES = {"tqdm.utils": "TQDM_", "networkx.utils.backends": "NETWORKX_"}
"""Modules that list the environment, but use only the variables with a prefix."""
VIEWS = ("os", "collections.abc", "_collections_abc")
"""Modules through which the environment is listed."""


def main() -> NoReturn:
    """Imports, then forks until the worker ends. In each forked process, runs the program."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    command, setup = sys.argv[2:], json.loads(channel.recv(MESSAGE_BYTES))
    target, is_module = command[setup["target"]], setup["is_module"]
    # What an import prints must not become the output of an attempt.
    os.dup2(2, 1)
    become(command, setup["target"], is_module=is_module)
    danger = import_all(target, setup["skipped"], setup["withheld"], is_module=is_module)
    channel.send(json.dumps(danger).encode())
    if danger is not None:
        os._exit(0)
    sys.stdout.flush()
    sys.stderr.flush()
    folder = os.getcwd()
    gc.collect()
    gc.freeze()
    begin(fork_on_request(channel), folder)
    run(target, is_module=is_module)


def become(command: list[str], target: int, *, is_module: bool) -> None:
    """Sets what Python sets before it runs a program. `target` is its position in the command."""
    sys.argv = ["-m" if is_module else command[target], *command[target + 1 :]]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv = command
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        real = os.path.realpath(command[target])
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(real)


def import_all(
    target: str, skipped: Collection[str], withheld: Collection[str], *, is_module: bool
) -> tuple[str, str] | None:
    """Imports what the program imports. Returns the first import that makes a fork unsafe, and why.

    The name of the import is empty if the interpreter itself does, with what its start imports.
    """
    if threads := count_threads():
        return "", f"it starts threads ({threads})"
    with watching_environment() as reads:
        files = os.listdir("/proc/self/fd")
        for name, names in imports_ahead.imports_ahead(target, is_module=is_module):
            if name in skipped:
                continue
            # If it fails, the program's own import fails again, and the program handles it.
            with suppress(Exception, SystemExit):
                __import__(name, fromlist=names)
            if threads := count_threads():
                return name, f"it starts threads ({threads})"
            if guard.children():
                return name, "it starts processes"
            if len(os.listdir("/proc/self/fd")) > len(files):
                return name, "it leaves files or sockets open"
            for read in sorted(reads):
                if any(fnmatchcase(variable, read) for variable in withheld):
                    what = "all variables" if read == ALL else read
                    return name, f"it reads {what} of the environment"
    return None


def count_threads() -> int:
    """Returns the number of threads beside this one, including those of native libraries."""
    return len(os.listdir("/proc/self/task")) - 1


@contextmanager
def watching_environment() -> Iterator[set[str]]:
    """Notes the names of the environment variables that are read meanwhile.

    If all are read by one of PREFIXES, it notes its prefix with ALL at the end.
    """
    reads: set[str] = set()
    kind: Any = type(os.environ)
    getitem, iterate = kind.__getitem__, kind.__iter__

    def noting_getitem(environ: Any, name: Any) -> Any:
        reads.add(name)
        return getitem(environ, name)

    def noting_iterate(environ: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__") in VIEWS:
            frame = frame.f_back
        reads.add(PREFIXES.get(str(frame.f_globals.get("__name__")), "") + ALL)
        return iterate(environ)

    kind.__getitem__, kind.__iter__ = noting_getitem, noting_iterate
    try:
        yield reads
    finally:
        kind.__getitem__, kind.__iter__ = getitem, iterate


def fork_on_request(channel: socket.socket) -> list[int]:
    """Forks one process per request. Returns its descriptors, in the process.

    The fork server itself ends here, when the worker has ended.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forked processes
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 1, DESCRIPTORS)
        if not message:
            os._exit(0)
        # At a limit of processes or memory the worker starts the program in the usual way.
        with suppress(OSError):
            if os.fork() == 0:
                channel.close()
                return list(descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def begin(descriptors: list[int], folder: str) -> None:
    """Makes a forked process that of an attempt, under a guard of its own."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *streams, lifeline, status = descriptors
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.write(status, b"%d\n" % os.getpid())
    with open(status, "rb", closefd=False) as file:
        line = file.readline()
    if not line:  # the worker has ended
        os._exit(guard.NOT_FOUND)
    guard.fork_guarded(lifeline, status)
    os.close(lifeline)
    os.close(status)
    os.chdir(folder)
    for name, value in json.loads(line).items():
        # If an import has set the variable, it would have replaced the attempt's value.
        os.environ.setdefault(name, value)
    # `random` reseeds itself in a forked process; the others don't.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()


def run(target: str, *, is_module: bool) -> NoReturn:
    """Runs the program as `python` does, up to the end of the process."""
    main_module: Any = types.ModuleType("__main__")
    main_module.__builtins__, main_module.__annotations__ = builtins, {}
    sys.modules["__main__"] = main_module
    try:
        if is_module:
            # What `python -m` calls. The public functions of runpy restore what they change.
            runpy._run_module_as_main(target)  # type: ignore[attr-defined]
        else:
            run_file(main_module, target)
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)
    sys.exit(0)


def run_file(main_module: Any, target: str) -> None:
    """Runs a program that is a file."""
    path = os.path.abspath(target)
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        where = f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
        sys.stderr.write(f"{sys.executable}: {where}\n")
        sys.exit(2)
    main_module.__file__ = path
    main_module.__cached__ = None
    main_module.__loader__ = SourceFileLoader("__main__", path)
    exec(compile(text, path, "exec", dont_inherit=True), vars(main_module))


if __name__ == "__main__":
    main()
