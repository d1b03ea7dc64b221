"""The preloader: imports what a run's services need, once, and forks their processes from it.

It is the hidden command `headrace preload SOCKET RECIPE ROOM`. `run` requests processes through
SOCKET (SOCK_SEQPACKET, inherited). Each request is a command line in JSON, with three descriptors:
the pipe from `run`, the log, and a socket. Through that socket the preloader reports on this one
process: first its pid together with a pidfd, then its exit code. A forked process is what the same
command line would have started: it has its own environment, session, standard streams and exit
code. ROOM is any text that is as long as the longest command line of a forked process, because
that replaces the preloader's in `ps`.

A fork copies only the thread that forks, so the preloader must have no other. It imports torch, a
GPU library or librdkafka but never uses them, and it does not import modules of the recipe's user.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from headrace.errors import HeadraceError
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.kafka.registry import Registry
from headrace.services.namespace.cluster_config import read_recipe
from headrace.services.operate.processes import MESSAGE_LIMIT, headrace_command, with_parent
from headrace.services.operate.run.children import services_of
from headrace.services.operate.serve.process_setup import (
    THREAD_VARIABLES,
    pause_garbage_collector,
    tune_garbage_collector,
)
from headrace.services.operate.serve.services import load_service
from headrace.services.processes.guard import die_with_parent


def fork_processes(descriptor: int, recipe: str) -> bool:
    """Imports, then forks processes until `run` has ended.

    Returns True in each forked process, with its command line in `sys.argv`, and False in the
    preloader itself.
    """
    # `run` may be killed during the imports, when nothing reads the socket.
    die_with_parent()
    pause_garbage_collector()
    with one_thread_each():
        import_services(read_recipe(recipe))
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.exit(f"the imports started {threads - 1} threads, so forking is not safe")
    tune_garbage_collector()
    with socket.socket(fileno=descriptor) as channel:
        channel.send(b"ready")
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
    """Imports what the recipe's services need, but no engine of the user: it may start threads.

    An import that fails is ignored here: the service's own process fails again and reports it.
    """
    policies = {
        name: policy for name, policy in recipe.policies.items() if ":" not in policy.engine.use
    }
    shipped = recipe.model_copy(update={"policies": policies})
    for service in services_of(recipe):
        with contextlib.suppress(ImportError, HeadraceError):
            load_service(service, shipped)
    # Its HTTP client imports most of itself only when a client is made. This one connects nowhere.
    Registry("http://127.0.0.1").close()


def fork_on_request(channel: socket.socket) -> list[str] | None:
    """Forks one process per request. Returns None when `run` has ended.

    In each forked process, returns the arguments of its command.
    """
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    born: dict[int, tuple[int, socket.socket]] = {}
    """Pidfd of each running process to its pid and its status socket."""
    while True:
        for descriptor, _ in poller.poll():
            if descriptor in born:
                poller.unregister(descriptor)
                os.close(descriptor)
                pid, status = born.pop(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with status, contextlib.suppress(BrokenPipeError):  # `run` has ended
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


def run_and_exit(command: Callable[[], None]) -> NoReturn:
    """Runs a command to its `sys.exit`, and exits with its code as Python does, but at once.

    Python would free every object first. With torch that takes half a second of CPU in each forked
    process, mostly to copy memory that it shares with the preloader.
    """
    code = 0
    try:
        command()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    threading._shutdown()  # type: ignore[attr-defined]  # It waits for threads, as Python does.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def show_command(command: Sequence[str]) -> None:
    """Overwrites this process's command line, which `ps` shows. A longer one is cut."""
    stat = Path("/proc/self/stat").read_text()
    # Fields 48 and 49 of proc(5). The third field follows the last parenthesis.
    start, end = (int(field) for field in stat.rpartition(")")[2].split()[45:47])
    size = end - start
    text = b"".join(part.encode() + b"\0" for part in command)
    ctypes.memmove(start, text[: size - 1].ljust(size, b"\0"), size)
