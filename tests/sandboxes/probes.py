"""Attempts to break out of a sandbox, or to harm who runs it. One that succeeds says ESCAPED.

Each is a command of `sh` as the policy would send it. What is harmless inside (a file in
/workspace, a full sandbox) is no escape.
"""

from __future__ import annotations

from tests.sandboxes.survivors import SHADOWS, SURVIVORS

PYTHON = "python3 - <<'END' 2>&1\n{}\nEND\n"


def _python(text: str) -> str:
    return PYTHON.format(text)


def _must_fail(command: str) -> str:
    return f"{command} 2>/dev/null && echo ESCAPED || echo refused"


def _syscall(number: str, what: str) -> str:
    """A system call by its number on x86-64, that must fail."""
    return _python(
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"print('ESCAPED' if libc.syscall({number}) >= 0 else 'refused {what}')"
    )


def _connect(host: str, port: int) -> str:
    return _python(
        "import socket\ntry:\n"
        f"    socket.create_connection(({host!r}, {port}), 2)\n    print('ESCAPED')\n"
        "except OSError as error:\n    print('refused', error)"
    )


def _writes(path: str) -> str:
    return _must_fail(f"(echo x > {path})")


PROBES: dict[str, str] = {
    # The network: nothing but the sandbox's own loopback.
    "tcp to the internet": _connect("1.1.1.1", 443),
    "tcp to the metadata address": _connect("169.254.169.254", 80),
    "tcp to the usual gateway": _connect("172.17.0.1", 22),
    "tcp to the host's broker": _connect("127.0.0.1", 9092),
    "dns": _python(
        "import socket\ntry:\n    socket.getaddrinfo('example.org', 80)\n    print('ESCAPED')\n"
        "except OSError:\n    print('refused')"
    ),
    "wget of the metadata": _must_fail("wget -T 2 -qO- http://169.254.169.254/"),
    "an interface but loopback": _must_fail("ls /sys/class/net | grep -v '^lo$'"),
    "a raw socket": _python(
        "import socket\ntry:\n    socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)\n"
        "    print('ESCAPED')\nexcept OSError:\n    print('refused')"
    ),
    "a packet socket": _python(
        "import socket\ntry:\n    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)\n"
        "    print('ESCAPED')\nexcept OSError:\n    print('refused')"
    ),
    # The engine, and other processes.
    "the engine's socket": _must_fail("find / -name '*.sock' -type s | grep ."),
    "any socket of the host": _must_fail("ls /run/*.sock /var/run/*.sock /host | grep ."),
    "processes of the host": _must_fail("ps | grep -E 'dockerd|pytest|java' | grep -v grep"),
    "killing the keeper": "kill -9 1; kill -9 7; sleep 1; echo lives",
    "ptrace of the keeper": _syscall("101, 16, 1, 0, 0", "ptrace"),
    "reading the keeper's memory": _must_fail("(cat /proc/1/mem)"),
    "the keeper's root": _must_fail("cd /proc/1/root"),
    "the keeper's environment": _must_fail("cat /proc/1/environ"),
    # Privileges.
    "setuid to root": _python(
        "import os\ntry:\n    os.setuid(0)\n    print('ESCAPED')\n"
        "except OSError:\n    print('refused')"
    ),
    "a setuid program": _must_fail("/bin/setuid-busybox id -u | grep -x 0"),
    "su": _must_fail("/bin/setuid-busybox su -c 'id -u' 2>&1 | grep -x 0"),
    "capabilities": "grep -E 'Cap(Eff|Prm|Bnd|Amb)' /proc/self/status | grep -v '0000000000000000' "
    "&& echo ESCAPED || echo none",
    "new privileges": "grep -q 'NoNewPrivs:.1' /proc/self/status || echo ESCAPED",
    "no filter of system calls": "grep -q 'Seccomp:.2' /proc/self/status || echo ESCAPED",
    "a user namespace": _must_fail("unshare -r id"),
    "a mount namespace": _must_fail("unshare -m id"),
    "entering the host's namespaces": _must_fail("nsenter -t 1 -m id"),
    "chown": _must_fail("touch c; chown 0 c"),
    # Mounts and devices.
    "writing to the root": _writes("/escaped"),
    "writing to programs": _writes("/bin/sh"),
    "writing to accounts": _writes("/etc/passwd"),
    "mounting a tmpfs": _must_fail("mount -t tmpfs none /tmp"),
    "remounting the root": _must_fail("mount -o remount,rw /"),
    "unmounting a mask": _must_fail("umount /proc/kcore /sys/firmware"),
    "making a device": _must_fail("mknod /workspace/sda b 8 0"),
    "a disk of the host": _must_fail("ls /dev | grep -E '^(sd|vd|nvme|dm-|mem|kmem|kvm)'"),
    "a core pattern": _writes("/proc/sys/kernel/core_pattern"),
    "a kernel setting": _writes("/proc/sys/vm/overcommit_memory"),
    "sysrq": _writes("/proc/sysrq-trigger"),
    "a release agent": _writes("/sys/fs/cgroup/memory/release_agent"),
    "its own memory limit": _writes("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    "kernel memory": _must_fail("head -c 1 /proc/kcore 2>/dev/null | grep ."),
    "chroot out": _must_fail("chroot /proc/self/root id"),
    # System calls that the filter must stop.
    "keyrings": _syscall("250, 0, -3, 1", "keyctl"),
    "bpf": _syscall("321, 5, 0, 0", "bpf"),
    "loading a module": _syscall("175, 0, 0, 0", "init_module"),
    "rebooting": _syscall("169, 0xfee1dead, 672274793, 0x1234567", "reboot"),
    "the clock": _syscall("164, 0, 0", "settimeofday"),
    "a handle to files outside": _syscall("304, -100, 0, 0", "open_by_handle_at"),
    # Exhaustion: the limit holds, and who runs it is well.
    "a fork bomb": "b(){ b|b& };b; sleep 1; echo over",
    "a fork bomb in Python": _python(
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    ),
    "memory": _python("held = []\nwhile True:\n    held.append(bytearray(2**24))"),
    "memory as files": "for folder in workspace tmp; do dd if=/dev/zero of=/$folder/f bs=1M; done",
    "memory as shared memory": "dd if=/dev/zero of=/dev/shm/f bs=1M; ls -l /dev/shm",
    "inodes": (
        "i=0; while touch /workspace/$i 2>/dev/null; do i=$((i+1)); done; "
        "[ $i -lt 20000 ] || echo ESCAPED"
    ),
    "a flood of output": "yes",
    "a flood of errors": "while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx >&2; done",
    "output that is no text": "head -c 3000000 /dev/urandom",
    "all processors": "for i in 1 2 3 4 5 6 7 8; do (while :; do :; done) & done; sleep 60",
    "what outlives its command": "(trap '' TERM HUP; sleep 600; echo ESCAPED) & echo over",
    "open files": _python("held = []\nwhile True:\n    held.append(open('/dev/null'))"),
    # The commands that follow: processes and files that are left for them.
    **SURVIVORS,
    **SHADOWS,
}
