"""A real sshd on loopback, of Debian's package, and an `ssh` that knows it.

Nothing is installed or configured. The server runs as a user without rights, who may forward
sockets and do nothing else: MaxSessions is 0.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests import debian

PACKAGES = ("openssh-server", "openssh-client", "libwrap0")
USER = "nobody"
START_S = 30.0
SERVER = """
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PidFile none
MaxSessions 0
MaxStartups 100
"""
CLIENT = """
IgnoreUnknown Unknown
Host jumped
  HostName 127.0.0.1
  ProxyJump hop
Host hop
  HostName 127.0.0.1
  Port {port}
  User {user}
  # As the documentation tells users.
  ControlMaster no
  ControlPath none
  StrictHostKeyChecking ask
Host 127.0.0.1
  # What would break the forward, and what another ssh does not know.
  Unknown yes
  ClearAllForwardings yes
  ForkAfterAuthentication yes
Host *
  IdentityFile {folder}/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  # What a user may have configured. A worker must not leave such a connection behind.
  ControlMaster auto
  ControlPath {folder}/shared-%C
  ControlPersist 600
"""


class SshServer:
    """A server. `ssh` is found in the folder `path`, and knows the server and a key for it."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.path = folder / "bin"
        self.user = USER if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        self._folder, self._programs = folder, programs
        self._daemon: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.path.mkdir()
        self._write("server", SERVER.format(folder=folder, port=self.port))
        self._write("client", CLIENT.format(folder=folder, port=self.port, user=self.user))
        for name in ("host", "user"):
            self._run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        key = (folder / "host.pub").read_text()
        self._write("known_hosts", f"[127.0.0.1]:{self.port} {key}")
        ssh = programs / "usr/bin/ssh"
        self._write("bin/ssh", f'#!/bin/sh\nexec {ssh} -F {folder}/client "$@"\n')
        (self.path / "ssh").chmod(0o755)
        if os.geteuid() == 0:
            shutil.chown(folder / "host", USER)

    def url(self, engine_socket: str, host: str = "127.0.0.1") -> str:
        """`jumped` is the same host behind a jump host, which is this host too."""
        return f"ssh://{self.user}@{host}:{self.port}{engine_socket}"

    def forget(self) -> None:
        """Has the client know no server."""
        self._write("known_hosts", "")

    def start(self) -> None:
        environment = {**os.environ, "LD_LIBRARY_PATH": self._libraries()}
        rights: tuple[str, ...] = ()
        if os.geteuid() == 0:
            # It may open an engine's socket in a folder that is root's alone.
            rights = (
                *("--reuid", USER, "--regid", "nogroup", "--clear-groups"),
                *("--inh-caps=-all,+dac_override", "--ambient-caps=-all,+dac_override"),
            )
        sshd = str(self._programs / "usr/sbin/sshd")
        with (self._folder / "sshd.log").open("ab") as log:
            self._daemon = subprocess.Popen(
                ["setpriv", *rights, "--pdeathsig", "KILL",
                 sshd, "-D", "-e", "-f", str(self._folder / "server")],
                env=environment, stdout=log, stderr=log,
            )  # fmt: skip
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._daemon.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError(f"sshd did not start: {(self._folder / 'sshd.log').read_text()}")

    def sessions(self) -> list[psutil.Process]:
        """The processes that serve one connection each."""
        assert self._daemon is not None
        return psutil.Process(self._daemon.pid).children(recursive=True)

    def clients(self) -> list[psutil.Process]:
        """The processes `ssh` that are connected to it, or try to be."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if str(self._folder / "client") in command and process.status() != "zombie":
                found.append(process)
        return found

    def stop(self) -> None:
        """Ends the server and its connections."""
        if self._daemon is None:
            return
        for session in self.sessions():
            session.kill()
        self._daemon.kill()
        self._daemon.wait()
        self._daemon = None

    def _write(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text)

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / "usr/bin" / program), *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    def _libraries(self) -> str:
        return ":".join({str(path.parent) for path in self._programs.rglob("lib*.so.*")})


@contextmanager
def ssh_server(folder: Path, shared: Path) -> Iterator[SshServer]:
    """A running server. Its programs are unpacked into `shared`, if that does not exist yet."""
    server = SshServer(folder, debian.unpacked(PACKAGES, shared))
    server.start()
    try:
        yield server
    finally:
        server.stop()
