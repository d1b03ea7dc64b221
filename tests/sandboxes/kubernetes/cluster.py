"""A private cluster of one node: etcd, API server, scheduler, containerd and kubelet, all real.

The Kubernetes programs are compiled from the Go module proxy, which takes minutes the first time,
and the rest is unpacked from Debian's packages. Nothing is installed. All of it ends with the
tests, killed or not.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from headrace.infra.local.detached import locked
from tests.debian import download, unpack
from tests.sandboxes.docker_engine import IMAGE, make_unpacked

HERE = Path(__file__).parent
BINARIES = ("server", "kube-apiserver", "kube-scheduler", "kubelet")
"""What the module in `go/` builds. `server` is etcd."""
PACKAGES = ("containerd", "runc", "containernetworking-plugins")
BUILD_S = 3600
START_S = 120.0
TOKENS = {"admin": "test-admin", "worker": "test-worker"}
"""Users of the cluster. `admin` may do everything, and `worker` what the tests bind it to."""
NAMESPACE = "sandboxes"
NODE = "node"
PAUSE = "localhost/pause:1"
REFERENCE = f"localhost/{IMAGE}:latest"
CACHE = "HEADRACE_TEST_KUBERNETES"
"""The variable that names a folder in which the programs are kept from run to run."""


def why_not() -> str:
    """Why no cluster can be had here; empty where it can."""
    if os.geteuid() != 0:
        return "a private cluster needs root"
    for program in ("go", "apt-get", "dpkg-deb", "openssl", "unshare"):
        if shutil.which(program) is None:
            return f"a private cluster needs {program}"
    return ""


@dataclass(frozen=True)
class Cluster:
    """A running cluster, whose pods may have the image REFERENCE."""

    kubeconfig: Path
    """Its current context, `admin`, may do everything."""
    url: str
    folder: Path
    _authority: Path
    ctr: tuple[str, ...]

    def call(self, method: str, path: str, body: Any = None, kind: str = "") -> dict[str, Any]:
        """Makes one call as the administrator."""
        request = urllib.request.Request(f"{self.url}{path}", method=method)
        request.add_header("Authorization", f"Bearer {TOKENS['admin']}")
        request.add_header("Content-Type", kind or "application/json")
        data = None if body is None else json.dumps(body).encode()
        context = ssl.create_default_context(cafile=self._authority)
        with urllib.request.urlopen(request, data, timeout=30, context=context) as answer:
            found = json.loads(answer.read())
        assert isinstance(found, dict)
        return found

    def pods(self) -> list[dict[str, Any]]:
        """Returns all pods, those that are being removed included."""
        return list(self.call("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")["items"])


@contextmanager
def cluster(folder: Path, shared: Path) -> Iterator[Cluster]:
    """A running cluster. What it is made of is in `shared`, and made if that does not exist."""
    kept = Path(os.environ.get(CACHE) or shared)
    with locked(kept.with_suffix(".lock"), BUILD_S):
        if not (kept / "bin" / "kubelet").exists():
            _build(kept)
        if not (kept / "unpacked").exists():
            _unpack_packages(kept)
        if not (kept / "docker" / "root.tar").exists():
            make_unpacked(kept / "docker.unfinished").rename(kept / "docker")
    with ExitStack() as stack:
        yield _started(stack, folder, kept)


def _build(kept: Path) -> None:
    kept.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly"}
    command = [
        "go",
        "build",
        "-trimpath",
        "-ldflags=-s -w",
        "-o",
        f"{kept}/bin.unfinished/",
        "tool",
    ]
    done = subprocess.run(
        command, cwd=HERE / "go", env=environment, check=False, timeout=BUILD_S,
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"Kubernetes can't be compiled here: {done.stderr.strip()[-500:]}")
    (kept / "bin.unfinished").rename(kept / "bin")


def _unpack_packages(kept: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        download(Path(name), list(PACKAGES))
        unpack(Path(name), PACKAGES, kept / "unpacked.unfinished")
    (kept / "unpacked.unfinished").rename(kept / "unpacked")


def _started(stack: ExitStack, folder: Path, kept: Path) -> Cluster:
    etcd, peer, api, kubelet, stream = _free_ports(5)
    programs = f"{kept}/bin:{kept}/unpacked/usr/sbin:{kept}/unpacked/usr/bin:{os.environ['PATH']}"

    def start(name: str, *command: str) -> None:
        log = stack.enter_context((folder / f"{name}.log").open("wb"))
        # Ended with the process that runs the tests, however that ends.
        child = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            env={**os.environ, "PATH": programs}, stdout=log, stderr=log, cwd=folder,
        )  # fmt: skip
        stack.callback(_end, child)

    start(
        "etcd", "server", "--data-dir", f"{folder}/etcd", "--unsafe-no-fsync",
        "--listen-client-urls", f"http://127.0.0.1:{etcd}",
        "--advertise-client-urls", f"http://127.0.0.1:{etcd}",
        "--listen-peer-urls", f"http://127.0.0.1:{peer}",
        "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
        "--initial-cluster", f"default=http://127.0.0.1:{peer}",
    )  # fmt: skip
    _api_server(start, folder, etcd, api)
    made = _client(folder, kept, api)
    _wait("the API server", lambda: made.call("GET", "/api/v1/namespaces/default"), folder)
    _node(start, made, kept, kubelet, stream)
    node = f"/api/v1/nodes/{NODE}"
    _wait("the kubelet", lambda: made.call("GET", node), folder)
    # A kubelet refuses the address of the loopback interface, and leaves the one that is there.
    address = {"status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}]}}
    patch = "application/strategic-merge-patch+json"
    made.call("PATCH", f"{node}/status", address, patch)
    _wait("the node", lambda: _is_ready(made.call("GET", node)), folder)
    return made


def _is_ready(node: Mapping[str, Any]) -> bool:
    conditions = node["status"].get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _api_server(start: Callable[..., None], folder: Path, etcd: int, port: int) -> None:
    key, tokens = folder / "accounts.key", folder / "tokens.csv"
    _run("openssl", "genrsa", "-out", str(key), "2048")
    tokens.write_text(f'{TOKENS["admin"]},admin,1,"system:masters"\n{TOKENS["worker"]},worker,2\n')
    start(
        "kube-apiserver", "kube-apiserver", "--etcd-servers", f"http://127.0.0.1:{etcd}",
        "--bind-address", "127.0.0.1", "--secure-port", str(port), "--cert-dir", f"{folder}/api",
        "--advertise-address", "127.0.0.1", "--service-cluster-ip-range", "10.96.0.0/16",
        "--service-account-issuer", "https://test", "--service-account-key-file", str(key),
        "--service-account-signing-key-file", str(key), "--token-auth-file", str(tokens),
        "--authorization-mode", "RBAC", "--endpoint-reconciler-type", "none",
        # Nothing here removes the taints of a new node.
        "--disable-admission-plugins", "TaintNodesByCondition",
    )  # fmt: skip


def _client(folder: Path, kept: Path, port: int) -> Cluster:
    url, authority = f"https://127.0.0.1:{port}", folder / "api" / "apiserver.crt"
    kubeconfig = folder / "kubeconfig"
    admin = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "admin",
        "clusters": [
            {"name": "test", "cluster": {"server": url, "certificate-authority": str(authority)}}
        ],
        "users": [{"name": name, "user": {"token": token}} for name, token in TOKENS.items()],
        "contexts": [
            {"name": name, "context": {"cluster": "test", "user": name}} for name in TOKENS
        ],
    }
    kubeconfig.write_text(json.dumps(admin))
    ctr = (f"{kept}/unpacked/usr/bin/ctr", "--address", f"{folder}/containerd.sock")
    return Cluster(kubeconfig, url, folder, authority, (*ctr, "--namespace", "k8s.io"))


def _node(start: Callable[..., None], made: Cluster, kept: Path, port: int, stream: int) -> None:
    folder = made.folder
    start(
        "kube-scheduler", "kube-scheduler", "--kubeconfig", str(made.kubeconfig),
        "--leader-elect=false", "--secure-port", "0",
    )  # fmt: skip
    networks = folder / "networks"
    networks.mkdir()
    ipam = {"type": "host-local", "subnet": "10.244.77.0/24", "dataDir": f"{folder}/addresses"}
    network = {"cniVersion": "1.0.0", "name": "test", "plugins": [{"type": "ptp", "ipam": ipam}]}
    (networks / "10-test.conflist").write_text(json.dumps(network))
    settings = CONTAINERD.format(folder=folder, kept=kept, pause=PAUSE, stream=stream)
    (folder / "containerd.toml").write_text(settings)
    config = {
        **KUBELET,
        "port": port,
        "containerRuntimeEndpoint": f"unix://{folder}/containerd.sock",
        "podLogsDir": f"{folder}/pod-logs",
    }
    (folder / "kubelet.json").write_text(json.dumps(config))
    # With namespaces of its own, so that no container and no mount outlives the node.
    start(
        "node", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
        "sh", "-ec", MACHINE, "sh", str(folder), str(made.kubeconfig), NODE,
    )  # fmt: skip
    _wait("containerd", lambda: _run(*made.ctr, "version"), folder)
    _import_images(made, kept / "docker" / "root.tar")
    (folder / "images-are-there").touch()


MACHINE = """
mount --make-rshared /
containerd --config "$1/containerd.toml" 2>"$1/containerd.log" &
while [ ! -e "$1/images-are-there" ]; do sleep 0.1; done
exec kubelet --config "$1/kubelet.json" --kubeconfig "$2" --root-dir "$1/kubelet" \\
  --cert-dir "$1/kubelet-pki" --hostname-override "$3" --node-ip 127.0.0.1
"""
CONTAINERD = """
version = 2
root = "{folder}/containerd"
state = "{folder}/containerd-state"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
stream_server_address = "127.0.0.1"
stream_server_port = "{stream}"
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{kept}/unpacked/usr/lib/cni"
conf_dir = "{folder}/networks"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
"""
KUBELET: Mapping[str, Any] = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "address": "127.0.0.1",
    "healthzPort": 0,
    "cgroupDriver": "cgroupfs",
    "failCgroupV1": False,
    "failSwapOn": False,
    "makeIPTablesUtilChains": False,
    "enforceNodeAllocatable": [],
    "evictionHard": {"memory.available": "1Mi", "nodefs.available": "1%"},
    "imageGCHighThresholdPercent": 100,
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "syncFrequency": "5s",
}


def _import_images(made: Cluster, root: Path) -> None:
    """Gives containerd the image of the sandboxes' tests under two names, one for the pause."""
    for name, command in ((REFERENCE, ["sh"]), (PAUSE, ["sleep", "1000000"])):
        archive = made.folder / "image.tar"
        _run("sh", "-c", f"sha256sum {root} | cut -c-64 >{made.folder}/digest")
        digest = (made.folder / "digest").read_text().strip()
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {"Cmd": command, "Env": ["PATH=/usr/bin:/bin"]},
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            }
        ).encode()
        manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
        with tarfile.open(archive, "w") as packed:
            for part, data in (
                ("config.json", config),
                ("manifest.json", json.dumps(manifest).encode()),
            ):
                member = tarfile.TarInfo(part)
                member.size = len(data)
                packed.addfile(member, BytesIO(data))
            packed.add(root, "layer.tar")
        _run(*made.ctr, "images", "import", str(archive))
        archive.unlink()


def _wait(what: str, ready: Callable[[], object], folder: Path) -> None:
    until, said = time.monotonic() + START_S, ""
    while time.monotonic() < until:
        try:
            if ready() is not False:
                return
        except (OSError, subprocess.CalledProcessError, urllib.error.URLError, ValueError) as error:
            said = str(error)
        time.sleep(0.3)
    logs = "\n".join(
        f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in folder.glob("*.log")
    )
    raise AssertionError(f"{what} was not ready: {said}\n{logs}")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()  # nothing of it is kept
    child.wait()


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
