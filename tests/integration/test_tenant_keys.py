"""Tenants with keys on a real broker: what others write for them, and all ways to submit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace import AsyncClient
from headrace.errors import UsageError
from headrace.infra import local
from headrace.schemas.codec import Codec
from headrace.schemas.events import QuotaSet, TaskCancelled, TaskSubmitted
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import DEAD_LETTERS, TASKS, Topics
from headrace.services.kafka.broker import Position
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import Patience
from headrace.services.log.request_signatures import REQUEST_KEY, RequestSigner
from headrace.services.log.signatures import public_text, write_private_key
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.namespace.apply import apply
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.connect import Connection, connect
from headrace.services.namespace.lookup import topics_of
from headrace.services.operate.cli import cli
from headrace.services.operate.dashboard.actions import DashboardActions
from headrace.services.operate.dashboard.views.fact_reader import FactReader
from headrace.services.operate.dead_letters.dead_letters import redrive
from headrace.services.operate.verify.log_report import examine
from headrace.services.operate.verify.verify import read_all
from headrace.services.scheduler.starts import NO_TENANT
from headrace.services.tasks import source
from headrace.services.tasks.task_maker import Item, TaskMaker
from headrace.services.worker.service_context import ServiceContext
from tests.commands import cluster_variables
from tests.integration.test_cancel import VERSION_0, Watch, serving

SETTINGS = (
    *("scheduler.live_episodes=64", "tasks.samples=1", "tasks.deadline_s=600", "tasks.tenant=mine"),
    *("tasks.options.items=1", "scheduler.require_reports=false"),
)


class Parties:
    """The keys of a tenant, of another one and of the operators, in files."""

    def __init__(self, folder: Path) -> None:
        self.files = {name: folder / f"{name}.pem" for name in ("mine", "theirs", "operator")}
        self.keys = {name: public_text(write_private_key(one)) for name, one in self.files.items()}

    def recipe(self) -> Recipe:
        settings = [
            f'scheduler.tenants.{name}.keys=["{self.keys[name]}"]' for name in ("mine", "theirs")
        ]
        settings.append(f'scheduler.operators=["{self.keys["operator"]}"]')
        return read_recipe("null", (*SETTINGS, *settings))

    def signer(self, name: str) -> RequestSigner:
        return RequestSigner(self.files[name])


async def command(
    arguments: Sequence[str], environment: dict[str, str], key: Path | None = None, text: str = ""
) -> Result:
    """Runs a command with somebody's key."""
    variables: dict[str, str | None] = {
        **environment,
        REQUEST_KEY: None if key is None else str(key),
    }
    return await asyncio.to_thread(CliRunner().invoke, cli, arguments, input=text, env=variables)


def forger(connection: Connection, namespace: str, recipe: Recipe, key: RequestSigner) -> EventLog:
    """A log that knows no keys, so that it writes whatever it is told to."""
    plain = Topics(
        namespace, tuple(recipe.policies), recipe.partitions, pool_partitions=recipe.pool_partitions
    )
    codec = Codec()
    connection.registry.prepare(codec, plain)
    return EventLog(connection.broker, plain, codec, connection.registry, "team", signer=key)


def of_mine(recipe: Recipe, task_id: str, by: str = "team") -> TaskSubmitted:
    return TaskMaker(recipe, by).make(Item("item"), task_id)


def refused(watch: Watch) -> set[int]:
    """The tasks that ended because their tenant was not proved."""
    found = set()
    for number, ended in watch.ended.items():
        failure = ended.outcomes[0].failure
        if failure is not None and failure.code == "unproved_tenant":
            assert (ended.tenant, ended.closed_by) == (NO_TENANT, "refused")
            assert REQUEST_KEY in failure.message
            found.add(number)
    return found


async def audited(environment: dict[str, str], parties: Parties) -> None:
    """Who did it, as `headrace audit` lists it afterwards."""
    found = await command(["audit", "--json"], environment)
    assert found.exit_code == 0, found.output
    entries = [json.loads(line) for line in found.stdout.splitlines()]
    told = {(one["operation"], one["holder"], bool(one["refused"])) for one in entries}
    assert told == {
        ("apply", "", False),
        ("submit", "", True),  # the forged ones
        ("submit", "theirs", True),
        ("submit", "mine", False),
        ("submit", "operator", False),
        ("cancel", "", False),  # nobody's: it counts for tenants without keys
        ("cancel", "mine", False),
        ("cancel", "operator", False),
        ("quota", "operator", False),
        ("redrive", "mine", False),
    }
    (changed,) = [one for one in entries if one["operation"] == "quota"]
    assert (changed["subject"], changed["key"]) == ("mine", parties.keys["operator"])
    shown = await command(["audit", "--operation", "redrive"], environment)
    assert "mine (proved" in shown.stdout


def test_only_the_keys_of_a_tenant_act_for_it(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    parties = Parties(tmp_path)
    recipe = parties.recipe()
    environment = cluster_variables(local_stack, namespace)
    cluster = ClusterConfig(tmp_path, local_stack.bootstrap_servers, local_stack.registry_url)
    everything = {*range(8), 9}
    line = json.dumps({"task_id": "by-command", "payload": {}})

    async def forge(connection: Connection) -> None:
        """Tasks 0 to 3: nobody's, another tenant's, a copy with another id, and a true one."""
        nobody = forger(connection, namespace, recipe, RequestSigner(None))
        await nobody.send(of_mine(recipe, "t"))
        await forger(connection, namespace, recipe, parties.signer("theirs")).send(
            of_mine(recipe, "t")
        )
        true = forger(connection, namespace, recipe, parties.signer("mine"))
        signed = true.outgoing(of_mine(recipe, "t"))
        other = nobody.outgoing(of_mine(recipe, "other"))
        await connection.broker.send(replace(other, headers=signed.headers))
        await connection.broker.send(signed)
        # What would stop the tenant, or cancel its task.
        await nobody.send(QuotaSet(tenant="mine", set_at=2**52, live_episodes=0))
        await nobody.send(TaskCancelled(source="team", task_id="t", reason="forged"))
        await nobody.send(VERSION_0)

    async def by_commands(watch: Watch) -> None:
        """Tasks 4 and 5, by the command and by the client; then they are cancelled."""
        for key in (None, parties.files["theirs"]):
            found = await command(["submit", "-"], environment, key, line)
            assert found.exit_code != 0
            assert REQUEST_KEY in str(found.exception)
        done = await command(["submit", "-", "--json"], environment, parties.files["mine"], line)
        assert (done.exit_code, json.loads(done.stdout)["task"]) == (0, 4), done.output
        arguments = (local_stack.bootstrap_servers, local_stack.registry_url, namespace)
        async with AsyncClient(*arguments, key=parties.files["mine"]) as client:
            (submitted,) = await client.submit([{"payload": {}, "task_id": "by-client"}])
            assert submitted.number == 5
        await watch.until(started=set(range(6)), ended={0, 1, 2})
        for key in (None, parties.files["theirs"]):
            found = await command(["cancel", "3", "4"], environment, key)
            assert "can't be cancelled" in str(found.exception)
            found = await command(["quota", "mine", "--weight", "2"], environment, key)
            assert "only an operator can change limits" in str(found.exception)
        for arguments_, name in (
            (["cancel", "4"], "mine"),
            (["cancel", "5"], "operator"),
            (["quota", "mine", "--weight", "2"], "operator"),
        ):
            done = await command(arguments_, environment, parties.files[name])
            assert done.exit_code == 0, done.output
        await watch.until(started=set(range(6)), ended={0, 1, 2, 4, 5})

    async def by_others(connection: Connection, log: EventLog, watch: Watch) -> None:
        """Task 6 by the dashboard, 7 by a redrive, whose end takes an offset, 9 by the source."""
        operator = replace(connection, source="dashboard", signer=parties.signer("operator"))
        reader = FactReader(connection.log(log.topics))
        actions = DashboardActions(operator, cluster, recipe, reader)
        with pytest.raises(UsageError, match="task 0 was refused, so it is not submitted again"):
            await actions.run("again", {"task": 0})
        assert (await actions.run("again", {"task": 4}))["task"] == 6
        await redriven(connection, log)
        stopping = asyncio.Event()
        blobs = LocalBlobStore(tmp_path / "blobs")
        context = ServiceContext(log, recipe, blobs, "s", tmp_path, stopping, asyncio.Event())
        submitting = asyncio.create_task(source.run(context))
        await watch.until(started=everything, ended={0, 1, 2, 4, 5, 7})
        submitting.cancel()
        await asyncio.wait([submitting])

    async def redriven(connection: Connection, log: EventLog) -> None:
        """The redriven copy of task 5 is signed, so it is a duplicate and not a forgery."""
        (record,) = await connection.broker.fetch([Position(log.topics.partition(TASKS), 5)])
        await log.dead_letter(record, "as if its schema was not known yet")
        letters = log.topics.partition(DEAD_LETTERS)
        number = (await connection.broker.ends([letters]))[letters][1] - 1
        results = [one async for one in redrive(log, [number], Patience(lambda line: None))]
        assert [why for _, why in results] == [""]

    async def main() -> None:
        async with connect(cluster, "test", parties.signer("mine")) as connection:
            log = await connection.writing_log(topics_of(recipe, namespace))
            await apply(log, recipe)
            await forge(connection)
            async with serving(log, recipe, tmp_path) as watch:
                await watch.until(started={0, 1, 2, 3}, ended={0, 1, 2})
                await by_commands(watch)
                await by_others(connection, log, watch)
                assert refused(watch) == {0, 1, 2}
                duplicate = watch.ended[7].outcomes[0].failure
                assert duplicate is not None
                assert duplicate.code == "duplicate"
                done = await command(["cancel", "3", "6", "9"], environment, parties.files["mine"])
                assert done.exit_code == 0, done.output
                await watch.until(started=everything, ended=everything)
            await audited(environment, parties)
            deliveries, _ = await read_all(log)
            report = examine(recipe, deliveries)
            assert not report.violations, str(report)

    asyncio.run(main())
