"""The preloader: imports what a run's services need, once, and forks their processes from it.

python -m headrace.services.operate.run.preload SOCKET RECIPE ROOM

Through SOCKET (SOCK_SEQPACKET, inherited) `run` asks for processes and is told of their birth and
end; a message is one JSON object. A process asked for is what the same command line would have
started: its environment, session, standard streams and exit code are its own. ROOM is of any text;
its length is what a forked process's command line finds room in.

A fork takes only the thread that forks along. So there must be one only: nothing here uses torch,
a GPU or librdkafka, it only imports them, and a recipe's own modules are left to the processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.namespace.cluster_config import read_recipe
from headrace.services.operate import cli
from headrace.services.operate.run.children import services_of
from headrace.services.operate.run.processes import MESSAGE_LIMIT, with_parent
from headrace.services.operate.run.supervisor import headrace_command
from headrace.services.operate.serve import SERVICES, THREAD_VARIABLES, spare_the_collector

_PR_SET_PDEATHSIG = 1
"""Of Linux's prctl.h."""


def main() -> None:
    """Imports, then forks until `run` is gone. In a forked process: runs its command."""
    descriptor, recipe, _ = sys.argv[1:]
    # `run` may be killed during the imports, when nobody looks at the socket.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with one_thread_each():
        import_services(read_recipe(recipe))
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.exit(f"{threads} threads after the imports: not safe to fork")
    spare_the_collector()
    with socket.socket(fileno=int(descriptor)) as channel:
        _tell(channel, {"ready": os.getpid()})
        arguments = fork_on_request(channel)
    if arguments is not None:
        sys.argv = ["headrace", *arguments]
        cli.main()


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    """Keeps numerical libraries from starting threads as they are imported.

    The environment is left as it was: each process bounds its own threads.
    """
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def import_services(recipe: Recipe) -> None:
    """Imports what the recipe's services need. What is wrong, the services' processes report."""
    importlib.import_module("headrace.services.namespace.connect")
    ours = _on_engines_that_ship(recipe)
    for service in services_of(recipe):
        with contextlib.suppress(ImportError, HeadraceError):
            module = importlib.import_module(SERVICES[service])
            if hasattr(module, "prepare"):
                module.prepare(ours)


def _on_engines_that_ship(recipe: Recipe) -> Recipe:
    """The recipe without policies on an engine of the user's own: what that imports may do all."""
    policies = {
        name: policy for name, policy in recipe.policies.items() if ":" not in policy.engine.use
    }
    return recipe.model_copy(update={"policies": policies})


def fork_on_request(channel: socket.socket) -> list[str] | None:
    """Forks a process a request. Returns None as `run` is gone, and arguments in each process."""
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    born: dict[int, int] = {}
    """Pidfd to pid, of the processes not ended yet."""
    while True:
        for descriptor, _ in poller.poll():
            if descriptor in born:
                poller.unregister(descriptor)
                os.close(descriptor)
                pid, status = os.waitpid(born.pop(descriptor), 0)
                _tell(channel, {"pid": pid, "code": os.waitstatus_to_exitcode(status)})
                continue
            try:
                message, passed, _, _ = socket.recv_fds(channel, MESSAGE_LIMIT, 2)
            except ConnectionResetError:
                return None  # `run` died with an answer unread
            if not message:
                return None
            request = json.loads(message)
            pid = os.fork()
            if not pid:
                for handle in born:
                    os.close(handle)
                return _begin(request["command"], *passed)
            for received in passed:
                os.close(received)
            handle = os.pidfd_open(pid)
            born[handle] = pid
            poller.register(handle, select.POLLIN)
            _tell(channel, {"number": request["number"], "pid": pid}, handle)


def _tell(channel: socket.socket, message: dict[str, int], *descriptors: int) -> None:
    socket.send_fds(channel, [json.dumps(message).encode()], descriptors)


def _begin(template: Sequence[str], parent: int, log: int) -> list[str]:
    """Makes a forked process what its command says. The arguments behind `headrace`."""
    command = with_parent(template, parent)
    show_command(command)
    os.setsid()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    return command[len(headrace_command()) :]


def show_command(command: Sequence[str]) -> None:
    """Puts a command line in the place of this process's own, where `ps` reads it; cut to fit."""
    stat = Path("/proc/self/stat").read_text()
    # proc(5): fields 48 and 49, counted from the third, which follows the last parenthesis.
    start, end = (int(field) for field in stat.rpartition(")")[2].split()[45:47])
    size = end - start
    text = b"".join(part.encode() + b"\0" for part in command)
    ctypes.memmove(start, text[: size - 1].ljust(size, b"\0"), size)


if __name__ == "__main__":
    main()
