"""A hardened pod for one sandbox: what it may do, in the form of the API's create call.

All commands of a pod run as its user, whose number only this pod has on its node. So the kernel's
limit of a user's processes limits the pod's processes, which the API has no field for.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.services.processes.docker.hardened import FILES, SHM_MB, WORK, Limits

CONTAINER = "sandbox"
"""The container of a pod in which commands run."""
NAME = "headrace.name"
"""The annotation that holds the name of a sandbox, which says whose it is."""
NETWORK = "headrace.network"
"""The label by which policies of the network select pods."""
FIRST_UID = 1_000_000_000
"""Least user id of a pod. A pod has one of the 2**28 that follow."""
KEEPER_UID = 65533
DISK_MB = 32
"""Ephemeral storage of a pod in MiB. Nothing of the policy is written there."""
GRACE_S = 1
"""Seconds from the deletion of a pod until its processes are killed. With 0, the API would forget
the pod before they are."""
INIT = """
umask 022
for found in "$(command -v sleep)" /bin/sleep /usr/bin/sleep; do
  if [ -f "$found" ]; then break; fi
done
own=/tmp/.headrace/sleep
if mkdir -p /tmp/.headrace && cp "$found" $own && chmod 111 $own; then
  if env --ignore-signal=CHLD true 2>/dev/null; then
    exec env --ignore-signal=CHLD $own "$1"
  elif python3 -c 'pass' 2>/dev/null; then
    exec python3 -I -S -c 'if 1:
      import os, signal, sys
      signal.signal(signal.SIGCHLD, signal.SIG_IGN)
      os.execv(sys.argv[1], sys.argv[1:])' $own "$1"
  elif perl -e 1 2>/dev/null; then
    exec perl -e '$SIG{CHLD} = "IGNORE"; exec @ARGV' $own "$1"
  fi
fi
echo "the image needs sh, sleep, cp, chmod and mkdir, and one of python3, perl, and GNU env 8.31" \
  >/dev/termination-log
exit 1
"""
"""The first process of a pod. It has the policy's user, because Kubernetes runs commands as the
user of their container. But the kernel keeps signals of the container from it, and nothing of the
same user can trace a process whose program can't be read. It ignores SIGCHLD, so that the kernel
removes the processes that end as its children. No shell passes that on to another program."""
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")


def user_of(token: str) -> int:
    """Returns the user id of the pod with this token, which begins with 7 hex digits."""
    return FIRST_UID + int(token[:7], 16)


def label_value(text: str) -> str:
    """Returns a text as the value of a label, which has at most 63 characters of a few kinds.

    A text that can't be one becomes the beginning of its SHA-256.
    """
    if _LABEL_VALUE.fullmatch(text):
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def limited(
    limits: Limits, command: Sequence[str], folder: str, *, reads: bool = False
) -> tuple[str, ...]:
    """Returns a command with the limits of its processes, in a folder.

    Shells have two letters for the most processes of a user. Files are limited because a container
    may write to its termination message, which is on the node's disk.

    `reads` is whether the command reads its stdin. containerd closes that as soon as one of the
    command's two outputs has ended, and a wrapper that joins them ends one. So a copy of stderr
    stays open. No other command gets one, because what outlives a command would hold it open.
    """
    # Of 512 bytes, as POSIX has it. /workspace is full before a file has reached this.
    blocks = (limits.disk_mb + 1) * 2048
    script = (
        f"ulimit -c 0; ulimit -n {FILES}; ulimit -f {blocks}; "
        f"ulimit -u {limits.pids} 2>/dev/null || ulimit -p {limits.pids} || exit 126; "
        'cd "$0" && exec "$@"'
    )
    if reads:
        script += " 3>&2"
    return ("sh", "-c", script, folder, *command)


def hardened_pod(
    limits: Limits,
    image: str,
    token: str,
    annotations: Mapping[str, str],
    live_s: int,
    network: str,
    user_namespace: bool = False,
) -> dict[str, Any]:
    """Returns the body of the API's create call.

    All `annotations` are labels, too. The kubelet kills the pod after `live_s` seconds, whatever
    has happened to the worker. `user_namespace` asks for one of the pod's own.
    """
    user = user_of(token)
    labels = {key: label_value(text) for key, text in annotations.items() if key != NAME}
    mine = {"app.kubernetes.io/managed-by": "headrace", NETWORK: label_value(network)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(token),
            "labels": labels | mine,
            "annotations": {
                **annotations,
                "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
            },
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": live_s,
            "terminationGracePeriodSeconds": GRACE_S,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "hostname": "sandbox",
            **_isolation(limits, network, user_namespace),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": user,
                "runAsGroup": user,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [_container(limits, image, live_s)],
            "volumes": [
                _memory("work", limits.disk_mb),
                _memory("tmp", max(1, limits.disk_mb // 4)),
                _memory("shm", SHM_MB),
            ],
        },
    }


def _isolation(limits: Limits, network: str, user_namespace: bool) -> dict[str, Any]:
    """The parts of a pod's specification that not every pod has."""
    parts: dict[str, Any] = {}
    if user_namespace:
        parts["hostUsers"] = False
    if limits.runtime:
        parts["runtimeClassName"] = limits.runtime
    if network == "none":
        parts |= {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}
    return parts


def keeper(name: str, image: str, command: Sequence[str]) -> dict[str, Any]:
    """Returns an ephemeral container that runs one command beside a sandbox, as another user.

    It sees the sandbox's processes, which can't affect it. What it writes to its standard output
    is its termination message.
    """
    script = 'exec >/dev/termination-log && exec "$@"'
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "targetContainerName": CONTAINER,
        "command": ["sh", "-c", script, "sh", *command],
        "workingDir": "/",
        "securityContext": _locked_in(KEEPER_UID),
    }


def pod_name(token: str) -> str:
    """Returns the name of the pod with this token. It never changes."""
    return f"headrace-{token}"


def _container(limits: Limits, image: str, live_s: int) -> dict[str, Any]:
    resources = {
        "memory": f"{limits.memory_mb}Mi",
        "cpu": f"{max(1, round(limits.cpus * 1000))}m",
        "ephemeral-storage": f"{DISK_MB}Mi",
    }
    # It lives longer than its pod, so that the pod's status has the reason of the end.
    return {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", INIT, "sh", str(live_s + 60)],
        "workingDir": WORK,
        "env": [
            {"name": name, "value": value}
            for name, value in (
                ("HOME", WORK),
                ("TMPDIR", "/tmp"),
                ("PYTHONDONTWRITEBYTECODE", "1"),
                ("LANG", "C.UTF-8"),
            )
        ],
        "resources": {"limits": resources, "requests": resources},
        "securityContext": _locked_in(),
        "volumeMounts": [
            {"name": "work", "mountPath": WORK},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _locked_in(user: int | None = None) -> dict[str, Any]:
    return {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        **({"runAsUser": user, "runAsGroup": user} if user is not None else {}),
    }


def _memory(name: str, size_mb: int) -> dict[str, Any]:
    return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": f"{size_mb}Mi"}}
