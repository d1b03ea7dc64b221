"""The preloader: imports what a run's services need, once, and forks their processes from it.

python -m services.run.preload SOCKET RECIPE ROOM

`run` asks for processes through SOCKET (SOCK_SEQPACKET, inherited). Each request is a command line
in JSON, with three descriptors: the pipe from `run`, the log, and a socket. Through that socket the
preloader reports on this one process: first its pid together with a pidfd, then its exit code. The
process is what the same command line would have started: it has its own environment, session,
standard streams and exit code. ROOM is any text as long as the longest command line, because a
forked process writes its command line in the place of the preloader's.

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
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from schemas.recipe import Recipe
from services import cli
from services.errors import HeadraceError
from services.processes.guard import die_with_parent
from services.run.children import services_of
from services.run.processes import MESSAGE_LIMIT, with_parent
from services.run.supervisor import headrace_command
from services.serve import SERVICES, THREAD_VARIABLES, spare_the_collector
from services.settings import read_recipe


def main() -> None:
    """Imports, then forks until `run` is gone. In a forked process: runs its command."""
    descriptor, recipe, _ = sys.argv[1:]
    # `run` may be killed during the imports, when nobody looks at the socket.
    die_with_parent()
    # Numerical libraries must not start threads as they are imported, but each process may.
    before = {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    import_services(read_recipe(recipe))
    for name in THREAD_VARIABLES:
        del os.environ[name]
    os.environ.update(before)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.exit(f"{threads} threads after the imports: not safe to fork")
    spare_the_collector()
    with socket.socket(fileno=int(descriptor)) as channel:
        channel.send(b"ready")
        arguments = fork_on_request(channel)
    if arguments is not None:
        sys.argv = ["headrace", *arguments]
        cli.main()


def import_services(recipe: Recipe) -> None:
    """Imports what the recipe's services need. What is wrong, the services' processes report."""
    importlib.import_module("services.connect")
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
    born: dict[int, tuple[int, socket.socket]] = {}
    """Pidfd to pid and status socket, of the processes not ended yet."""
    while True:
        for descriptor, _ in poller.poll():
            if descriptor in born:
                poller.unregister(descriptor)
                os.close(descriptor)
                pid, status = born.pop(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with status, contextlib.suppress(BrokenPipeError):  # `run` is gone
                    status.send(str(code).encode())
                continue
            message, passed, _, _ = socket.recv_fds(channel, MESSAGE_LIMIT, 3)
            if not message:
                return None
            parent, log, told = passed
            status = socket.socket(fileno=told)
            if not (pid := os.fork()):
                status.close()
                for handle, (_, other) in born.items():
                    os.close(handle)
                    other.close()
                return _begin(json.loads(message), parent, log)
            os.close(parent)
            os.close(log)
            handle = os.pidfd_open(pid)
            born[handle] = pid, status
            poller.register(handle, select.POLLIN)
            socket.send_fds(status, [str(pid).encode()], [handle])


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
