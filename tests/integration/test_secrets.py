"""Secrets on all their ways through a run, and none in what the run leaves behind or shows."""

from __future__ import annotations

import base64
import html
import http.client
import json
import os
import random
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
from confluent_kafka.admin import AdminClient
from confluent_kafka.schema_registry import SchemaRegistryClient

from headrace.infra import local
from headrace.infra.local.detached import port_is_free
from tests.integration.test_other_teams import a_task, headrace, read_all, write_foreign

PROGRAM = str(Path(__file__).with_name("secret_program.py"))
BOUND_S = 240.0
NAMES = (
    *("DATA_SET", "AGENT_KEY", "AGENT_FILE", "AGENT_DEEP", "WORLD_KEY", "WORLD_URL", "WORLD_PEM"),
    *("JURY_FILE", "ENGINE_KEY", "MCP_ENVIRONMENT", "MCP_TOKEN", "HTTP_TOKEN", "OPENENV_TOKEN"),
    *("LIBRARY", "PROGRAM_KEY", "SASL", "SSL_KEY", "REGISTRY", "AWS_SECRET_ACCESS_KEY"),
    "HEADRACE_GATEWAY_KEY",
)
CONTROL = f"control-{uuid.uuid4().hex}"
"""No secret, but a text of the recipe: everything that must hold no secret holds this one."""
SEEN = "seen"
"""A file that the test makes once it has read the program's command line."""
SAMPLE_S = 0.1
PROCESSES = 12
"""At least as many ports as the run has processes."""


def canary(name: str) -> str:
    """A secret with characters that JSON, URLs and HTML escape."""
    return f"{name.lower()}-{uuid.uuid4().hex}+/=\"'&\\x"


def recipe(files: Path, url: str) -> str:
    agent = json.dumps([sys.executable, PROGRAM, "agent", CONTROL, str(files / SEEN)])
    server = json.dumps([sys.executable, PROGRAM, "mcp"])
    token = '{ token = { env = "TOKEN_NAME" }'
    return f"""
        name = "secrets"
        partitions = 1
        [tasks]
        use = "tests.integration.secretive:items"
        options = {{ token = {{ env = "DATA_SET" }} }}
        agent = "teller"
        environment = "world"
        epochs = 1
        samples = 1
        max_turns = 1
        max_tokens = 8
        deadline_s = 200
        [agents.default]
        [agents.teller]
        use = "tests.integration.secretive:tell"
        [agents.teller.options]
        literal = "{CONTROL}"
        key = {{ env = "AGENT_KEY" }}
        file = {{ file = "{files / "AGENT_FILE"}" }}
        deep = [{{ list = [{{ env = "AGENT_DEEP" }}] }}]
        [agents.program]
        use = "command"
        [agents.program.options]
        command = {agent}
        environment = {{ API_KEY = {{ env = "PROGRAM_KEY" }} }}
        [environments.world]
        use = "tests.integration.secretive:World"
        [environments.world.options]
        key = {{ env = "WORLD_KEY" }}
        url = {{ env = "WORLD_URL" }}
        pem = {{ file = "{files / "WORLD_PEM"}" }}
        [environments.jury]
        use = "tests.integration.secretive:Jury"
        options = {{ key = {{ file = "{files / "JURY_FILE"}" }} }}
        [environments.tools]
        use = "mcp"
        [environments.tools.options]
        command = {server}
        reset_tool = "ask"
        timeout_s = 150
        environment = {{ TOKEN = {{ env = "MCP_ENVIRONMENT" }} }}
        [environments.mcp-url]
        use = "mcp"
        options = {token.replace("TOKEN_NAME", "MCP_TOKEN")}, url = "{url}" }}
        [environments.http]
        use = "http"
        options = {token.replace("TOKEN_NAME", "HTTP_TOKEN")}, url = "{url}" }}
        [environments.openenv]
        use = "openenv"
        options = {token.replace("TOKEN_NAME", "OPENENV_TOKEN")}, url = "{url}" }}
        [environments."library"]
        use = "reasoning_gym"
        options = {{ suffix = {{ env = "LIBRARY" }} }}
        [policies.default]
        model = "tiny-llama"
        training = false
        [policies.default.engine]
        use = "tests.integration.secretive:Engine"
        options = {{ key = {{ env = "ENGINE_KEY" }} }}
    """


class Echo(BaseHTTPRequestHandler):
    """A server that refuses everyone, and repeats the header that it refuses."""

    def do_POST(self) -> None:
        header = self.headers["Authorization"]
        body = f"{header}\n{html.escape(header)}\n{json.dumps({'got': header})}".encode()
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(401, header)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST  # noqa: N815

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def echo() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Sampler:
    """Collects the command lines and the metrics of all processes of a run while it lives."""

    def __init__(self, pid: int, port: int, seen: Path) -> None:
        self.arguments: set[str] = set()
        self.metrics: dict[int, str] = {}
        self._run, self._port, self._seen = psutil.Process(pid), port, seen
        self._over = threading.Event()
        works = (self._read_arguments, self._read_metrics)
        self._threads = [threading.Thread(target=self._repeat, args=(work,)) for work in works]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the collection."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._over.wait(SAMPLE_S):
            with suppress(psutil.Error):
                work()

    def _read_arguments(self) -> None:
        for process in [self._run, *self._run.children(recursive=True)]:
            with suppress(psutil.Error):
                self.arguments.add("\0".join(process.cmdline()))
        if any(CONTROL in line for line in self.arguments):
            self._seen.touch()

    def _read_metrics(self) -> None:
        for port in range(self._port, self._port + PROCESSES):
            with suppress(OSError, http.client.HTTPException):
                url = f"http://127.0.0.1:{port}/metrics"
                with urllib.request.urlopen(url, timeout=1) as answer:
                    text = answer.read().decode()
                    # An answer that ends within its headers, as its process does, has no length.
                    if "Content-Length" in answer.headers:
                        self.metrics[port] = text


def free_ports() -> int:
    """The first of PROCESSES free ports, below those that systems give to clients."""
    starts = random.Random().sample(range(12_000, 30_000, PROCESSES), 100)
    return next(
        start for start in starts if all(map(port_is_free, range(start, start + PROCESSES)))
    )


def spellings(secret: str) -> set[bytes]:
    """Texts from which a secret could be read. The first one is its part without escapes."""
    found = {secret.partition("+")[0]}
    for before in ("user:", "", "x"):
        text = base64.b64encode((before + secret).encode()).decode()
        found.add(text[8:40])
    return {one.encode() for one in found}


def topics_of(servers: str, namespace: str) -> dict[str, bytes]:
    """All keys, values and headers of each topic of a namespace."""
    names = AdminClient({"bootstrap.servers": servers}).list_topics(timeout=10).topics
    return {
        name.removeprefix(f"{namespace}."): b"\n".join(
            repr((message.headers(), message.key())).encode() + (message.value() or b"")
            for message in read_all(servers, name)
        )
        for name in names
        if name.startswith(f"{namespace}.")
    }


def test_no_secret_is_left_behind_or_shown(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    secrets = {name: canary(name) for name in NAMES}
    state, files = tmp_path / "state", tmp_path / "files"
    files.mkdir(mode=0o700)
    pem = f"-----BEGIN KEY-----\n{secrets['WORLD_PEM']}\n-----END KEY-----"
    for name in ("AGENT_FILE", "WORLD_PEM", "JURY_FILE"):
        (files / name).write_text(f"{pem if name == 'WORLD_PEM' else secrets[name]}\n")
    registry = local_stack.registry_url.replace(
        "://", f"://user:{urllib.parse.quote(secrets['REGISTRY'], safe='')}@"
    )
    properties = f"sasl.password={secrets['SASL']} ssl.key.password={secrets['SSL_KEY']}"
    quoted = urllib.parse.quote(secrets["WORLD_URL"], safe="")
    environment = {
        **{name: secret for name, secret in secrets.items() if not (files / name).exists()},
        "WORLD_URL": f"https://user:{quoted}@world/path",
        "HEADRACE_KAFKA_PROPERTIES": properties,
        "HEADRACE_BOOTSTRAP_SERVERS": local_stack.bootstrap_servers,
        "HEADRACE_REGISTRY_URL": registry,
        "HEADRACE_NAMESPACE": namespace,
        "HEADRACE_STATE": str(state),
    }
    for name in ("SASL", "SSL_KEY", "REGISTRY"):
        del environment[name]
    servers, port = local_stack.bootstrap_servers, free_ports()
    with echo() as url:
        path = tmp_path / "recipe.toml"
        path.write_text(recipe(files, url))
        headrace(("apply", str(path)), environment)
        submit(local_stack, namespace)
        run = ("run", str(path), "--json", "--metrics-port", str(port))
        with subprocess.Popen(
            [sys.executable, "-m", "headrace", *run],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as running:
            sampler = Sampler(running.pid, port, files / SEEN)
            late = threading.Timer(BOUND_S, running.kill)
            late.start()
            output, errors = running.communicate()
            late.cancel()
            sampler.stop()
    assert running.returncode == 0, errors.decode()
    shown = headrace(("recipe", str(path)), environment) + headrace(("show", "0"), environment)

    places = {f"topic {name}": data for name, data in topics_of(servers, namespace).items()}
    kept = [path for path in state.rglob("*") if path.is_file()]
    places |= {f"file {path.relative_to(state)}": path.read_bytes() for path in kept}
    places |= {f"metrics {at}": text.encode() for at, text in sampler.metrics.items()}
    places |= {"arguments": "\n".join(sampler.arguments).encode()}
    places |= {"stdout": output, "stderr": errors, "commands": shown.encode()}
    found = {
        (name, place)
        for name, secret in secrets.items()
        for spelling in spellings(secret)
        for place, data in places.items()
        if spelling in data
    }
    assert not found, sorted(found)
    everyone_tells(places, secrets)
    assert state.stat().st_mode & 0o077 == 0
    open_to_others = [
        path for path in kept if path.suffix in (".log", ".json") and path.stat().st_mode & 0o077
    ]
    assert open_to_others == []


def submit(stack: local.LocalStack, namespace: str) -> None:
    """Writes the tasks that the data set does not have."""
    tells = [("teller", "world", how) for how in ("raise", "infrastructure", "usage", "agent")]
    others = [("default", name, "x") for name in ("tools", "mcp-url", "http", "openenv", "library")]
    programs = [("program", None, how) for how in ("works", "fails")]
    problem = {"dataset": "chain_sum", "seed": 0, "index": 0, "config": {"size": 1}}
    tasks = [
        a_task(
            f"{agent} {name} {how}",
            agent=agent,
            environment=None if name is None else {"use": name},
            payload=json.dumps({"how": how, **problem}),
            deadline_s=200,
            attempts=1,
        )
        for agent, name, how in [*tells, *others, *programs]
    ]
    with SchemaRegistryClient({"url": stack.registry_url}) as registry:
        write_foreign(stack.bootstrap_servers, registry, f"{namespace}.tasks.v1", *tasks)


def everyone_tells(places: dict[str, bytes], secrets: dict[str, str]) -> None:
    """The search finds what is no secret, and each secret was in its place but for redaction."""
    control = {place.split()[0] for place, data in places.items() if CONTROL.encode() in data}
    assert control >= {"topic", "file", "arguments", "commands"}
    log = b"".join(data for place, data in places.items() if place.endswith(".log"))
    records = b"".join(data for place, data in places.items() if place.startswith("topic"))
    for name in ("AGENT_KEY", "AGENT_DEEP", "ENGINE_KEY", "DATA_SET", "MCP_ENVIRONMENT"):
        assert f"[secret {name}]".encode() in log, name
    for name in (
        *("AGENT_KEY", "WORLD_KEY", "ENGINE_KEY", "DATA_SET", "MCP_ENVIRONMENT", "HTTP_TOKEN"),
        *("LIBRARY", "PROGRAM_KEY", "WORLD_URL"),
    ):
        assert f"[secret {name}]".encode() in records, name
    for name in ("AGENT_FILE", "JURY_FILE", "WORLD_PEM"):
        assert f"/{name}]".encode() in records, name
    metrics = [data for place, data in places.items() if place.startswith("metrics")]
    assert len(metrics) >= 3
    assert all(data.startswith(b"# HELP") for data in metrics)
