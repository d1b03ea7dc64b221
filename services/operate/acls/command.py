"""`headrace acls`: prints or creates the ACLs of a namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    echo,
    print_json,
    print_table,
    say,
    set_option,
)

if TYPE_CHECKING:
    from headrace.services.kafka.client_settings import KafkaSettings
    from headrace.services.namespace.cluster_config import ClusterConfig
    from headrace.services.operate.acls.grant import Grants


@click.command()
@click.argument("recipe")
@set_option
@click.option(
    "--principal", metavar="USER", default="User:headrace-{role}", show_default=True,
    help="The principal of each role; {role} stands for the role's name.",
)  # fmt: skip
@click.option(
    "--role", "roles", metavar="ROLE", multiple=True,
    help="A service, or operator, redrive, reader, guest or external-env. Repeatable. "
    "[default: all]",
)  # fmt: skip
@click.option(
    "--quota", "quotas", metavar="KEY=NUMBER", multiple=True,
    help="A quota of the roles' principals: producer_byte_rate or consumer_byte_rate (bytes a "
    "second), or request_percentage (of one thread's time), on each broker. Or KEY=none. "
    "Repeatable.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--strimzi", metavar="KAFKA", help="Print KafkaUsers of this Strimzi cluster.")
@click.option(
    "--apply", "create", is_flag=True, help="Create the ACLs and set the quotas on the brokers."
)
@click.option(
    "--prune", is_flag=True,
    help="With --apply: delete ACLs of the principals in this namespace that the roles don't need.",
)  # fmt: skip
@cluster_options
def acls(
    recipe: str,
    settings: tuple[str, ...],
    principal: str,
    roles: tuple[str, ...],
    quotas: tuple[str, ...],
    as_json: bool,
    strimzi: str | None,
    create: bool,
    prune: bool,
    **options: Any,
) -> None:
    """Print or create the Kafka ACLs and quotas that a run needs.

    Each service has a principal of its own, which may read and write what this service needs. So
    have the operator and other teams. Every ACL names one topic, consumer group or transactional id
    in full. Other teams also have quotas. Without --apply, this needs no broker. With --apply, the
    ACLs are added to those that the brokers have, and quotas are set for principals that have none;
    to do this twice changes nothing. It also shows ACLs that the roles do not need.

    \b
    Examples:
      headrace acls quickstart
      headrace acls my.toml --namespace exp-7 --apply --bootstrap-servers broker:9092 \\
          --registry-url http://registry:8081
      headrace acls my.toml --strimzi my-kafka > users.yaml
      headrace acls my.toml --role guest --role external-env --principal User:team-b --json
      headrace acls my.toml --role guest --quota producer_byte_rate=2000000 --apply
    """
    from headrace.services.namespace.access_table import ACCESS
    from headrace.services.namespace.cluster_config import read_recipe
    from headrace.services.namespace.lookup import topics_of
    from headrace.services.operate.acls.grant import Grants
    from headrace.services.operate.acls.principal_quotas import parse_quotas
    from headrace.services.operate.acls.strimzi_users import kafka_users

    if unknown := [role for role in roles if role not in ACCESS]:
        raise click.UsageError(f"{unknown[0]!r} is no role: choose from {', '.join(ACCESS)}")
    if as_json + create + (strimzi is not None) > 1:
        raise click.UsageError("--json, --strimzi and --apply exclude each other: choose one")
    if prune and not create:
        raise click.UsageError("--prune deletes ACLs on the brokers: give it together with --apply")
    if quotas and not roles:
        raise click.UsageError("--quota would limit every service: name the roles with --role")
    cluster = cluster_of(dict(options))
    resolved = read_recipe(recipe, settings)
    topics = topics_of(resolved, cluster.namespace or resolved.name)
    grants = Grants.of(topics, principal, roles, parse_quotas(quotas))
    if as_json:
        print_json([*(one._asdict() for one in grants.every), *_quota_rows(grants)])
    elif strimzi is not None:
        echo(kafka_users(grants.permissions, grants.quotas, strimzi))
    elif create:
        _create(cluster, grants, prune)
    else:
        _print(grants)


def _quota_rows(grants: Grants) -> list[dict[str, Any]]:
    return [
        {"principal": principal, "quota": key, "value": value}
        for principal, quotas in grants.quotas.items()
        for key, value in quotas.items()
    ]


def _print(grants: Grants) -> None:
    merged: dict[tuple[str, str, str], list[str]] = {}
    for one in grants.every:
        merged.setdefault(one[:3], []).append(one.operation)
    rows = [[*key, ", ".join(words)] for key, words in merged.items()]
    print_table(("principal", "resource", "name", "operations"), rows)
    if quotas := _quota_rows(grants):
        echo("")
        head = ("principal", "quota on each broker", "value")
        print_table(
            head, [[*map(str, list(row.values())[:2]), f"{row['value']:,}"] for row in quotas]
        )


def _create(cluster: ClusterConfig, grants: Grants, prune: bool) -> None:
    from headrace.services.operate.acls.grant import (
        for_other_runs,
        give_access,
        prune_acls,
        surplus_acls,
    )

    settings = _administrator(cluster)
    changes = give_access(settings, grants)
    servers = settings.bootstrap_servers
    say(f"the brokers at {servers} have these {len(grants.every)} ACLs now")
    for user, change in changes.items():
        now = ", ".join(
            f"no {key}" if value is None else f"{key} {value:,.0f}" for key, value in change.items()
        )
        say(f"quotas of {user} on each broker: {now}")
    surplus = prune_acls(settings, grants) if prune else surplus_acls(settings, grants)
    kept = [one for one in surplus if for_other_runs(one)]
    for one in surplus:
        said = "deleted" if prune else "not needed by these roles"
        if one in kept:
            said = "left, perhaps for a run with reads_from"
        say(f"{said}: {one.principal} {one.operation} {one.resource} {one.name}")
    if len(surplus) > len(kept) and not prune:
        say(f"--prune deletes {len(surplus) - len(kept)} of these ACLs")


def _administrator(cluster: ClusterConfig) -> KafkaSettings:
    from dataclasses import replace

    from headrace.services.kafka.client_settings import KafkaSettings
    from headrace.services.namespace.connect import locate
    from headrace.services.namespace.credentials import ADMINISTRATOR

    located = locate(replace(cluster, role=ADMINISTRATOR))
    servers = str(located.bootstrap_servers)
    return KafkaSettings(servers, "headrace-acls", located.broker_properties())
