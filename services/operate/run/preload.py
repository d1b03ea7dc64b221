"""The preloader: imports what a run's services need, once, and forks their processes from it.

It is the hidden command `headrace preload SOCKET RECIPE ROOM`. Through SOCKET (SOCK_SEQPACKET,
inherited) `run` requests processes, and the preloader reports when each one starts and ends. A
message is one JSON object. A forked process is what the same command line would have started: it
has its own environment, session, standard streams and exit code. ROOM is any text that is as long
as the longest command line of a forked process, because that replaces the preloader's in `ps`.

A fork copies only the thread that forks, so the preloader must have no other. It imports torch, a
GPU library or librdkafka but never uses them, and it does not import modules of the recipe's user.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from headrace.services.operate.run.children import services_of
from headrace.services.operate.run.processes import MESSAGE_LIMIT, with_parent
from headrace.services.operate.run.supervisor import headrace_command
from headrace.services.operate.serve.process_setup import THREAD_VARIABLES, tune_garbage_collector
from headrace.services.operate.serve.services import load_service

_PR_SET_PDEATHSIG = 1
"""From Linux's `prctl.h`."""


def fork_processes(descriptor: int, recipe: str) -> bool:
    """Imports, then forks processes until `run` has ended.

    Returns True in each forked process, with its command line in `sys.argv`, and False in the
    preloader itself.
    """
    # `run` may be killed during the imports, when nothing reads the socket.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with one_thread_each():
        import_services(read_recipe(recipe))
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.exit(f"the imports started {threads - 1} threads, so forking is not safe")
    tune_garbage_collector()
    with socket.socket(fileno=descriptor) as channel:
        _tell(channel, {"ready": os.getpid()})
        arguments = fork_on_request(channel)
    if arguments is None:
        return False
    sys.argv = ["headrace", *arguments]
    return True


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    """Keeps numerical libraries from starting threads when they are imported.

    Restores the environment afterwards, because each process limits its own threads.
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
    """Imports what the recipe's services need.

    An import that fails is ignored here: the service's own process fails again and reports it.
    """
    shipped = _with_shipped_engines(recipe)
    for service in services_of(recipe):
        with contextlib.suppress(ImportError, HeadraceError):
            load_service(service, shipped)


def _with_shipped_engines(recipe: Recipe) -> Recipe:
    """Removes the policies with an engine of the user, whose imports may start threads."""
    policies = {
        name: policy for name, policy in recipe.policies.items() if ":" not in policy.engine.use
    }
    return recipe.model_copy(update={"policies": policies})


def fork_on_request(channel: socket.socket) -> list[str] | None:
    """Forks one process per request. Returns None when `run` has ended.

    In each forked process, returns the arguments of its command.
    """
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    born: dict[int, int] = {}
    """The pid of each running process, by its pidfd."""
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
                return None  # `run` died and left an answer unread
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
    """Sets up a forked process for its command. Returns the arguments after `headrace`."""
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
    """Overwrites this process's command line, which `ps` shows. A longer one is cut."""
    stat = Path("/proc/self/stat").read_text()
    # Fields 48 and 49 of proc(5). The third field follows the last parenthesis.
    start, end = (int(field) for field in stat.rpartition(")")[2].split()[45:47])
    size = end - start
    text = b"".join(part.encode() + b"\0" for part in command)
    ctypes.memmove(start, text[: size - 1].ljust(size, b"\0"), size)
