"""`python3 infra/make_venv.py FOLDER [PYTHON]`: makes a virtual environment.

Without PYTHON it takes the first Python 3.11 to 3.13 of PATH, or another one there that is clearly
faster and lacks nothing. Builds of one version differ: without profile-guided optimization and as a
shared library, as some version managers build it, Python takes up to twice as long for the same
code. This runs before anything is installed, also on Python 3.6.
"""

import json
import os
import subprocess
import sys
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence

OLDEST, NEWEST = (3, 11), (3, 13)
NAMES = ("python3", "python3.11", "python3.12", "python3.13")
CLEARLY = 1.2
"""How many times as fast another Python must be to replace the first one of PATH."""
NEEDED = {"CPython", "venv", "ensurepip"}
PROBE_S = 20.0
PROBE = """
import json, os, platform, sys, sysconfig, time
has = [platform.python_implementation()]
for module in ("venv", "ensurepip", "ssl", "ctypes", "sqlite3", "bz2", "lzma", "zlib"):
    try:
        __import__(module)
        has.append(module)
    except ImportError:
        pass
if os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    has.append("headers")  # with which Triton compiles on a GPU

class Counter:
    def __init__(self, start):
        self.value = start
    def next(self):
        self.value += 1
        return self.value

def work():
    began = time.process_time()
    counter, seen = Counter(0), {}
    for number in range(20_000):
        seen[str(number % 100)] = (counter.next(), len(seen))
    return time.process_time() - began

print(json.dumps({
    "path": sys.executable,
    "version": sys.version_info[:3],
    "has": has,
    "seconds": min(work() for _ in range(7)),
}))
"""
"""Describes the Python that runs it, as JSON."""


class Interpreter(NamedTuple):
    """An interpreter, as it describes itself."""

    path: str
    version: Sequence[int]
    has: Sequence[str]
    """Its implementation, and what it has of what may be left out of a build."""
    seconds: float
    """CPU time of a small piece of work."""

    @property
    def is_usable(self) -> bool:
        """Whether Headrace runs on it, and it can make a virtual environment."""
        return set(self.has) >= NEEDED and OLDEST <= tuple(self.version[:2]) <= NEWEST

    def __str__(self) -> str:
        lacks = sorted(NEEDED - set(self.has))
        version = ".".join(map(str, self.version))
        return f"{self.path} ({version}{', without ' + ' and '.join(lacks) if lacks else ''})"


def choose(found: Sequence[Interpreter]) -> Optional[Interpreter]:
    """The first usable Python, or one that is clearly faster and lacks nothing that it has."""
    usable = [one for one in found if one.is_usable]
    if not usable:
        return None
    first = usable[0]
    fastest = min(
        (one for one in usable if set(one.has) >= set(first.has)),
        key=lambda one: one.seconds,
    )
    return fastest if first.seconds > CLEARLY * fastest.seconds else first


def probe(command: str) -> Optional[Interpreter]:
    """Asks an interpreter about itself. None if it does not answer."""
    try:
        said = subprocess.check_output(
            [command, "-c", PROBE],
            stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=PROBE_S,
        )  # fmt: skip
        return Interpreter(**json.loads(said.decode()))
    except (OSError, ValueError, TypeError, subprocess.SubprocessError):
        return None


def on_path(folders: Iterable[str]) -> List[Interpreter]:
    """The interpreters of these folders, in their order, each once."""
    found: Dict[str, Interpreter] = {}
    for folder in folders:
        for name in NAMES:
            command = os.path.join(folder, name)
            if not os.access(command, os.X_OK):
                continue
            python = probe(command)
            if python is not None:
                found.setdefault(os.path.realpath(python.path), python)
    return list(found.values())


def main() -> int:
    """Makes the environment, and tells why it took another Python than the first one."""
    folder, *named = sys.argv[1:]
    if named:
        found = [one for one in map(probe, named) if one is not None]
    else:
        found = on_path(os.environ.get("PATH", os.defpath).split(os.pathsep))
    chosen = choose(found)
    if chosen is None:
        seen = ", ".join(map(str, found)) or "none"
        wanted = "Headrace needs CPython 3.11 to 3.13 with the modules venv and ensurepip"
        where = f"{named[0]} is no such Python" if named else "PATH has no such Python"
        print(
            f"{wanted}. {where}; found: {seen}. Install one (Debian: python3-venv), or name it: "
            f"make PYTHON=/path/to/python3.12",
            file=sys.stderr,
        )
        return 1
    first = next(one for one in found if one.is_usable)
    if chosen is not first:
        print(
            f"using {chosen}, which is {first.seconds / chosen.seconds:.1f} times as fast as "
            f"{first}. To use another Python: make PYTHON=/path/to/python3"
        )
    return subprocess.run([chosen.path, "-m", "venv", folder], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
