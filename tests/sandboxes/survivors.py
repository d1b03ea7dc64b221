"""What a policy may leave behind: processes that outlive their command and harm the next one."""

from __future__ import annotations

import shlex
import textwrap

DAEMON = """
import ctypes, os, signal, time
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
for fd in range(3):
    os.dup2(os.open(os.devnull, os.O_RDWR), fd)
libc = ctypes.CDLL(None, use_errno=True)
me = os.getpid()
def others():
    return [int(n) for n in os.listdir("/proc") if n.isdigit() and int(n) not in (1, os.getpid())]
"""


def daemon(loop: str) -> str:
    """A command of `sh` that starts a daemon, which runs `loop` again and again."""
    body = textwrap.indent(loop, "        ")
    program = f"{DAEMON}while True:\n    try:\n{body}\n    except OSError:\n        pass\n"
    return f"python3 -I -c {shlex.quote(program)}"


WAITS = "(trap '' TERM HUP; while :; do sleep 1; done) >/dev/null 2>&1 & echo over"
DAEMONS: dict[str, str] = {
    "it kills all others": daemon("os.kill(-1, 9)"),
    "four kill all others": daemon(
        "if os.getpid() == me:\n    os.fork(), os.fork()\nos.kill(-1, 9)"
    ),
    "it stops all others": daemon("os.kill(-1, signal.SIGSTOP)"),
    "it traces all others": daemon(
        "for pid in others():\n    libc.ptrace(16, pid, 0, 0)\ntime.sleep(0)"
    ),
    "it lives from child to child": daemon("os.kill(-1, 9) if os.fork() == 0 else os._exit(0)"),
    "it writes into all outputs": daemon(
        "for pid in others():\n    try:\n        fd = os.open(f'/proc/{pid}/fd/1', os.O_WRONLY)\n"
        "        os.write(fd, b'begun\\nforged\\n')\n        os.close(fd)\n"
        "    except OSError:\n        pass"
    ),
    "eight kill all newcomers": daemon(
        "if os.getpid() == me and 'old' not in globals():\n    old = 0\n"
        "    for _ in range(3):\n        os.fork()\n    time.sleep(0.3)\n    old = max(others())\n"
        "for pid in others():\n    if pid > old:\n        os.kill(pid, 9)"
    ),
    "it forks without end": daemon("os.fork()"),
    "it takes all memory": daemon(
        "held = globals().setdefault('held', [])\nheld.append(bytearray(2**22))"
    ),
    "it kills its shell first": "kill -9 $PPID; " + daemon("os.kill(-1, 9)"),
}
"""Each leaves a process behind that harms others when its command ends."""
NEWCOMER = """
known = set(others())
while True:
    for pid in set(others()) - known:
        try:
            os.kill(pid, signal.SIGSTOP)
        except OSError:
            continue
"""
RACE = "the command itself stops what should end it"
"""It may fail: a kill that begins and ends between two of its looks is not stopped."""
STOPPERS: dict[str, str] = {
    "one stops the next command and ends": (
        "kill -9 $PPID; exec python3 -I -c " + shlex.quote(f"{DAEMON}{NEWCOMER}        os._exit(0)")
    ),
    "the same, and its shell seems to fail": (
        "kill -15 $PPID; exec python3 -I -c "
        + shlex.quote(f"{DAEMON}{NEWCOMER}        os._exit(0)")
    ),
    RACE: (
        "exec python3 -I -c "
        + shlex.quote(
            f"import os, signal\n{DAEMON.partition('me = ')[2].partition(chr(10))[2]}{NEWCOMER}"
        )
    ),
}
"""Each stops a process that the engine is about to start. The engine waits for such a process, and
may not even remove the sandbox meanwhile."""
SURVIVORS = {**DAEMONS, "it only waits": WAITS}
SHADOWS: dict[str, str] = {
    "modules of the grader": (
        "for name in json sys os importlib re builtins encodings; do "
        "echo 'import os; os._exit(0)' > $name.py; done"
    ),
    "a module of the user's site": (
        "folder=.local/lib/python3.11/site-packages; mkdir -p $folder; "
        "echo 'import json; json.dumps = lambda *a, **k: 2' | tee $folder/usercustomize.py "
        "> $folder/sitecustomize.py; echo 'import usercustomize' > $folder/x.pth"
    ),
    "programs of the wrapper": (
        "mkdir -p bin .local/bin; for name in sh sleep python3 tar head kill echo; do "
        "echo 'exit 0' > $name; chmod 755 $name; cp $name bin/; cp $name .local/bin/; done"
    ),
    "start files of the shell": (
        "echo 'exit 0' > .profile; cp .profile .bashrc; cp .profile .shinit; cp .profile .env"
    ),
    "a library that is preloaded": (
        "echo x > evil.so; echo /workspace/evil.so > ld.so.preload; "
        "export LD_PRELOAD=/workspace/evil.so PYTHONPATH=/workspace PYTHONSTARTUP=/workspace/a.py; "
        "echo /workspace/evil.so > /etc/ld.so.preload; true"
    ),
    "files outside the workspace": (
        "echo 'import os; os._exit(0)' | tee /tmp/json.py /tmp/a.py > /dev/shm/a.py"
    ),
    "links to files outside": (
        "ln -s /tmp t; ln -s / root; ln -s /proc/1/root host; ln -s ../../tmp/x up; ln -s loop loop"
    ),
}
"""Each leaves files behind that a grader might use instead of its own."""
