"""Apache Kafka as one process: broker and controller (KRaft), for one machine."""

from __future__ import annotations

import base64
import shutil
import subprocess
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path

from headrace.errors import DependencyError
from headrace.infra.local.detached import Cancelled, describe_log
from headrace.infra.local.java_runtime import JavaRuntime

HEAP = ("-Xms256m", "-Xmx512m")
MESSAGE_BYTES = 8 * 1024 * 1024
_FORMAT_BOUND_S = 60
_FORMAT_POLL_S = 0.02
# But for what went wrong, and the line that tells that the broker is up.
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
    # One broker: its own topics can have one replica only.
    "offsets.topic.num.partitions": 1,
    "offsets.topic.replication.factor": 1,
    "transaction.state.log.num.partitions": 1,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "share.coordinator.state.topic.num.partitions": 1,
    "share.coordinator.state.topic.replication.factor": 1,
    "share.coordinator.state.topic.min.isr": 1,
    # A topic is made with its partitions and retention or not at all.
    "auto.create.topics.enable": "false",
    "message.max.bytes": MESSAGE_BYTES,
    "replica.fetch.max.bytes": MESSAGE_BYTES,
    # An abandoned transaction holds up read_committed readers for as long as this.
    "transaction.max.timeout.ms": 60_000,
    # A year: a stack left down for weeks must still find its groups' positions.
    "offsets.retention.minutes": 525_600,
    # A dead member is to be noticed within seconds, by classic and KIP-848 groups alike.
    "group.initial.rebalance.delay.ms": 0,
    "group.min.session.timeout.ms": 1_000,
    "group.consumer.session.timeout.ms": 6_000,
    "group.consumer.min.session.timeout.ms": 3_000,
    "group.consumer.heartbeat.interval.ms": 1_000,
    "group.consumer.min.heartbeat.interval.ms": 500,
    # A killed broker is let in again once the session of its former life has run out.
    "broker.session.timeout.ms": 3_000,
    "broker.heartbeat.interval.ms": 500,
    # Two cores are shared with everything else.
    "num.network.threads": 2,
    "num.io.threads": 4,
    "background.threads": 2,
    "num.recovery.threads.per.data.dir": 2,
    "log.cleaner.dedupe.buffer.size": 1_048_577,
}


def render_properties(port: int, controller_port: int, log_folder: str) -> str:
    """The text of `server.properties`, listening on 127.0.0.1 only.

    `log_folder` is relative to the process's folder: no path of a user's, which may hold commas
    or backslashes, is ever quoted in it.
    """
    broker = f"PLAINTEXT://127.0.0.1:{port}"
    settings = _SETTINGS | {
        "listeners": f"{broker},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": broker,
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "log.dirs": log_folder,
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())


def format_log(runtime: JavaRuntime, state: Path, log: Path, cancelled: threading.Event) -> None:
    """Make the empty log folder `<state>/kafka`, unless there is one.

    Raises DependencyError, and Cancelled once `cancelled` is set.
    """
    folder = state / "kafka"
    if folder.exists():
        return
    unfinished = state / "kafka-format"
    shutil.rmtree(unfinished, ignore_errors=True)
    properties = state / "kafka-format.properties"
    properties.write_text(render_properties(1, 2, unfinished.name))  # ports aren't looked at
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    # With "=", for an id may begin with a dash. Formatting uses a start-up archive, it makes none.
    tool = ["kafka.tools.StorageTool", "format", f"--cluster-id={cluster}", "-c", str(properties)]
    command = replace(runtime, recording=None).command(state, "kafka", [*_QUIET, *tool])
    deadline = time.monotonic() + _FORMAT_BOUND_S
    with (
        log.open("ab") as output,
        subprocess.Popen(
            command,
            cwd=state,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a terminal's Ctrl-C is for this process to act on
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
    # Whole or not at all, whatever is killed in between.
    unfinished.rename(folder)
    properties.unlink()


def command(runtime: JavaRuntime, state: Path, port: int, controller_port: int) -> list[str]:
    """Write the broker's properties; the command line that starts it, to be run in `state`."""
    properties = state / "kafka.properties"
    properties.write_text(render_properties(port, controller_port, "kafka"))
    arguments = [*_QUIET, "kafka.Kafka", str(properties)]
    return runtime.command(state, "kafka", arguments)


def is_ready(log: Path) -> bool:
    """Whether the broker that writes this log serves: a port alone could be another's."""
    return _STARTED in log.read_bytes()
