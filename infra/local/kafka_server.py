"""Apache Kafka as one process: broker and controller (KRaft)."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path

from headrace.errors import DependencyError
from headrace.infra.local.detached import Cancelled
from headrace.infra.local.jars import KAFKA_VERSION
from headrace.infra.local.java_runtime import JavaRuntime
from headrace.infra.local.security.secure_settings import broker_settings
from headrace.services.base.files import describe_log, private

HEAP = ("-Xms256m", "-Xmx512m")
META = "meta.properties"
MESSAGE_BYTES = 8 * 1024 * 1024
_FORMAT_BOUND_S = 60
_FORMAT_POLL_S = 0.02
# Log only problems, and the line which says that the broker has started.
_QUIET = tuple(
    f"-Dorg.slf4j.simpleLogger.{setting}"
    for setting in (
        "defaultLogLevel=warn",
        "log.kafka.server.KafkaRaftServer=info",
        "showDateTime=true",
        "dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSSXXX",
    )
)
_STARTED = b"Kafka Server started"

_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": 1,
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    # With one broker, its own topics can have one replica only.
    "offsets.topic.num.partitions": 1,
    "offsets.topic.replication.factor": 1,
    "transaction.state.log.num.partitions": 1,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "share.coordinator.state.topic.num.partitions": 1,
    "share.coordinator.state.topic.replication.factor": 1,
    "share.coordinator.state.topic.min.isr": 1,
    # A topic is created explicitly, with its partitions and retention.
    "auto.create.topics.enable": "false",
    "message.max.bytes": MESSAGE_BYTES,
    "replica.fetch.max.bytes": MESSAGE_BYTES,
    # An abandoned transaction blocks read_committed readers for at most this long.
    "transaction.max.timeout.ms": 60_000,
    # One year: a stack that was down for weeks must still find its groups' positions.
    "offsets.retention.minutes": 525_600,
    # Classic and KIP-848 groups must notice a dead member within seconds.
    "group.initial.rebalance.delay.ms": 0,
    "group.min.session.timeout.ms": 1_000,
    "group.consumer.session.timeout.ms": 6_000,
    "group.consumer.min.session.timeout.ms": 3_000,
    "group.consumer.heartbeat.interval.ms": 1_000,
    "group.consumer.min.heartbeat.interval.ms": 500,
    # A killed broker can join again only when its old session has expired.
    "broker.session.timeout.ms": 3_000,
    "broker.heartbeat.interval.ms": 500,
    # All other processes share the two cores. More threads cost a few percent more CPU a request.
    "num.network.threads": 1,
    "num.io.threads": 2,
    "background.threads": 2,
    "num.recovery.threads.per.data.dir": 2,
    "log.cleaner.dedupe.buffer.size": 1_048_577,
}


def render_properties(port: int, controller_port: int, log_folder: str) -> str:
    """Returns the text of `server.properties`. The broker listens on 127.0.0.1 only.

    `log_folder` is relative to the process's folder, because a user's path may have commas or
    backslashes, which would need quoting.
    """
    broker = f"PLAINTEXT://127.0.0.1:{port}"
    settings = _SETTINGS | {
        "listeners": f"{broker},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": broker,
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "log.dirs": log_folder,
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())


def format_log(
    runtime: JavaRuntime, state: Path, log: Path, cache: Path, cancelled: threading.Event
) -> None:
    """Creates the empty log folder `<state>/kafka` if it is missing.

    Kafka's tool does that once for a `cache`: all empty logs are equal but for their ids. Raises
    DependencyError if that fails, and Cancelled once `cancelled` is set.
    """
    folder = state / "kafka"
    if folder.exists():
        return
    unfinished = state / "kafka-format"
    shutil.rmtree(unfinished, ignore_errors=True)
    digest = hashlib.sha256(json.dumps([KAFKA_VERSION, _SETTINGS]).encode()).hexdigest()[:16]
    template = cache / f"kafka-formatted-{digest}"
    if _is_whole(template):
        shutil.copytree(template, unfinished)
    else:
        _run_format_tool(runtime, state, log, unfinished, cancelled)
        with contextlib.suppress(OSError):  # The cache is full, or another process was first.
            _keep_template(unfinished, template)
    meta = unfinished / META
    meta.write_text(with_fresh_ids(meta.read_text()))
    # The rename is atomic: if a process is killed meanwhile, there is no half formatted folder.
    unfinished.rename(folder)


def with_fresh_ids(meta: str) -> str:
    """Returns the text of a log's `meta.properties` with other random ids, as every log has."""
    return re.sub(r"(?m)^((?:cluster|directory)\.id)=.*$", lambda at: f"{at[1]}={_new_id()}", meta)


def _new_id() -> str:
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


def _is_whole(template: Path) -> bool:
    """Returns whether a template is there, and has survived a loss of power."""
    try:
        meta = (template / META).read_text()
        return "cluster.id=" in meta and "directory.id=" in meta
    except (OSError, ValueError):
        return False


def _keep_template(formatted: Path, template: Path) -> None:
    """Copies an empty log to the cache. Another process may do the same. Raises OSError."""
    scratch = Path(tempfile.mkdtemp(prefix=f"{template.name}.", dir=template.parent))
    try:
        shutil.copytree(formatted, scratch / "log")
        if template.exists():  # It is damaged.
            template.rename(scratch / "damaged")
        (scratch / "log").rename(template)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run_format_tool(
    runtime: JavaRuntime, state: Path, log: Path, unfinished: Path, cancelled: threading.Event
) -> None:
    properties = state / "kafka-format.properties"
    properties.write_text(render_properties(1, 2, unfinished.name))  # the ports are not used
    # With "=", because an id may begin with a dash. Formatting does not record a start-up archive.
    tool = ["kafka.tools.StorageTool", "format", f"--cluster-id={_new_id()}", "-c", str(properties)]
    command = replace(runtime, recording=None).command(state, "kafka", [*_QUIET, *tool])
    deadline = time.monotonic() + _FORMAT_BOUND_S
    with (
        open(log, "ab", opener=private) as output,
        subprocess.Popen(
            command,
            cwd=state,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # so that a terminal's Ctrl-C does not reach it
            umask=0o077,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
        ) as process,
    ):
        while process.poll() is None:
            if cancelled.wait(_FORMAT_POLL_S):
                process.kill()
                raise Cancelled
            if time.monotonic() > deadline:
                process.kill()
                raise DependencyError(
                    f"formatting Kafka's log exceeded {_FORMAT_BOUND_S} s; {describe_log(log)}"
                )
    if process.returncode != 0:
        raise DependencyError(f"formatting Kafka's log failed; {describe_log(log)}")
    properties.unlink()


def command(
    runtime: JavaRuntime, state: Path, port: int, controller_port: int, *, secure: bool = False
) -> list[str]:
    """Writes the broker's properties. Returns its command line, which must be run in `state`."""
    text = render_properties(port, controller_port, "kafka")
    if secure:  # Of two lines with one key, the last one counts.
        more = broker_settings(port, controller_port)
        text += "".join(f"{key}={value}\n" for key, value in more.items())
    properties = state / "kafka.properties"
    properties.write_text(text)
    arguments = [*_QUIET, "kafka.Kafka", str(properties)]
    return runtime.command(state, "kafka", arguments)


def is_ready(log: Path) -> bool:
    """Returns whether the broker with this log serves. A port could be another process's."""
    return _STARTED in log.read_bytes()
