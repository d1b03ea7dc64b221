"""A run whose services log in by certificates, SCRAM-SHA-512 or short tokens, while some die.

Each service has its own principal, with the ACLs of `headrace acls` alone. Tokens are valid for 60
seconds, and the broker ends each connection whose token has ended. `assemble-groups` logs in by
Faust's client, all others by librdkafka.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

import pytest

from headrace.infra.local.security.certificates import CertificateAuthority
from headrace.services.namespace.access_table import ACCESS
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.operate.run.children import services_of
from headrace.services.operate.verify.verify import check_namespace
from tests.e2e import harness
from tests.e2e.test_kill_each_process import assert_whole
from tests.integration.test_login_errors import failure_of, other_name
from tests.login_stack import ENDED, TOKEN_S, LoginStack, login_stack

pytestmark = pytest.mark.long

RUN_S, SHORT_S = 300, 90
START_S, END_S = 120.0, 120.0
KILL_EVERY_S = 15.0
USERS = [f"headrace-{role}" for role in (*ACCESS, "administrator")]


@pytest.fixture(scope="module")
def logins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoginStack]:
    """A stack whose broker knows a user for each role."""
    folder = tmp_path_factory.mktemp("logins")
    with (
        pytest.MonkeyPatch.context() as patch,
        login_stack(folder, patch, USERS, "headrace-administrator") as found,
    ):
        yield found


async def kill_in_turn(state: Path, services: Sequence[str], until: float) -> int:
    """Kills a process every `KILL_EVERY_S`. Returns how many were killed."""
    killed = 0
    for service in cycle(services):
        await asyncio.sleep(KILL_EVERY_S)
        if time.monotonic() >= until:
            return killed
        for process in harness.processes_of(state, "serve", service):
            process.kill()
            killed += 1
    raise AssertionError("there are no services")


@pytest.mark.parametrize(
    ("way", "run_s"),
    [("certificate", RUN_S), ("scram", RUN_S), ("token", RUN_S), ("pem", SHORT_S)],
)
def test_nothing_is_lost_or_doubled(
    way: str, run_s: int, tmp_path: Path, logins: LoginStack, namespace: str
) -> None:
    credentials, state = tmp_path / "credentials", tmp_path / "state"
    logins.write_credentials(way, credentials, (*ACCESS, "administrator"))
    settings = ("stop.reward=2.0", "stop.versions=100000", f"stop.seconds={run_s}")
    services = services_of(read_recipe("quickstart", settings))
    place = ClusterConfig(
        state, logins.servers(way), logins.stack.registry_url, namespace=namespace,
        credentials=credentials,
    )  # fmt: skip
    given = len(logins.tokens.given)

    async def main() -> None:
        arguments = (
            *("run", "quickstart", "--no-check", "--check", "failures==0"),
            *(word for one in settings for word in ("--set", one)),
            *("--state", str(state), "--namespace", namespace),
            *("--credentials", str(credentials), "--registry-url", logins.stack.registry_url),
            *("--bootstrap-servers", logins.servers(way)),
        )
        async with harness.headrace(*arguments) as run:
            await run.says("running", START_S)
            killed = await kill_in_turn(state, services, time.monotonic() + run_s - 30)
            assert await run.ends(30 + END_S) == 0, run.said
        report = await check_namespace(place)
        print(f"{way}: {run_s} s, {killed} kills, {len(logins.tokens.given) - given} tokens")
        assert_whole(report)
        assert killed >= (run_s - 30) / KILL_EVERY_S / 2
        assert report.versions["default"] >= 2

    try:
        harness.run_bounded(main(), START_S + run_s + 2 * END_S)
        harness.gone(state)
    finally:
        harness.end_all_of(state)
    if way == "token":
        of_faust = logins.tokens.given[given:].count("headrace-assemble-groups")
        # Its client has one token at a time, which it replaces in time.
        assert of_faust >= run_s / TOKEN_S


def test_what_is_wrong_is_said_within_seconds(logins: LoginStack, tmp_path: Path) -> None:
    """`failure_of` also asserts that it takes 10 s at most."""
    other = tmp_path / "other-ca.pem"
    other.write_bytes(CertificateAuthority("other", time.time()).pem)

    def said(way: str, user: str = "headrace-operator", at: str = "", **changed: str) -> str:
        properties = logins.properties(way, user)
        properties |= {key.replace("_", "."): value for key, value in changed.items()}
        return failure_of(logins.servers(at or way), properties)

    for way in ("certificate", "scram", "token"):
        assert said(way) == ""
        assert "name the authority of the broker's certificate with ssl.ca.location" in said(
            way, ssl_ca_location=str(other)
        )
    assert "certificate has expired: the broker needs a new certificate" in said(
        "certificate", at="ended"
    )
    assert "can't log in to Kafka" in said("certificate", ENDED)
    port = int(logins.servers("certificate").rpartition(":")[2])
    with other_name(port) as address:
        wrong = failure_of(address, logins.properties("certificate", "headrace-operator"))
    assert "the broker's certificate has another name" in wrong
    wrong = said("scram", sasl_password="canary12")
    assert "check sasl.mechanism, sasl.username and sasl.password" in wrong
    assert "canary12" not in wrong
    wrong = said("token", sasl_oauthbearer_client_secret="canary12")
    assert "sasl.oauthbearer" in wrong
    assert "canary12" not in wrong
