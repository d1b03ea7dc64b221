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
    from headrace.services.kafka.broker import Permission
    from headrace.services.namespace.cluster_config import ClusterConfig


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
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--strimzi", metavar="KAFKA", help="Print KafkaUsers of this Strimzi cluster.")
@click.option("--apply", "create", is_flag=True, help="Create the ACLs on the brokers.")
@cluster_options
def acls(
    recipe: str,
    settings: tuple[str, ...],
    principal: str,
    roles: tuple[str, ...],
    as_json: bool,
    strimzi: str | None,
    create: bool,
    **options: Any,
) -> None:
    """Print or create the Kafka ACLs that a run needs.

    Each service has a principal of its own, which may read and write what this service needs. So
    have the operator and other teams. Every ACL names one topic, consumer group or transactional id
    in full. Without --apply, this needs no broker. With --apply, the ACLs are added to those that
    the brokers have; to do this twice changes nothing.

    \b
    Examples:
      headrace acls quickstart
      headrace acls my.toml --namespace exp-7 --apply --bootstrap-servers broker:9092 \\
          --registry-url http://registry:8081
      headrace acls my.toml --strimzi my-kafka > users.yaml
      headrace acls my.toml --role guest --role external-env --principal User:team-b --json
    """
    from headrace.services.namespace.access_table import ACCESS
    from headrace.services.namespace.cluster_config import read_recipe
    from headrace.services.namespace.lookup import topics_of
    from headrace.services.operate.acls.grant import permissions_of
    from headrace.services.operate.acls.strimzi_users import kafka_users

    if unknown := [role for role in roles if role not in ACCESS]:
        raise click.UsageError(f"{unknown[0]!r} is no role: choose from {', '.join(ACCESS)}")
    if as_json + create + (strimzi is not None) > 1:
        raise click.UsageError("--json, --strimzi and --apply exclude each other: choose one")
    cluster = cluster_of(dict(options))
    resolved = read_recipe(recipe, settings)
    topics = topics_of(resolved, cluster.namespace or resolved.name)
    found = permissions_of(topics, principal, roles)
    every = [one for of_one in found.values() for one in of_one]
    if as_json:
        print_json([one._asdict() for one in every])
    elif strimzi is not None:
        echo(kafka_users(found, strimzi))
    elif create:
        _create(cluster, every)
    else:
        merged: dict[tuple[str, str, str], list[str]] = {}
        for one in every:
            merged.setdefault(one[:3], []).append(one.operation)
        rows = [[*key, ", ".join(words)] for key, words in merged.items()]
        print_table(("principal", "resource", "name", "operations"), rows)


def _create(cluster: ClusterConfig, found: list[Permission]) -> None:
    from dataclasses import replace

    from headrace.services.kafka.client_settings import KafkaSettings
    from headrace.services.kafka.visibility import create_acls
    from headrace.services.namespace.connect import locate
    from headrace.services.namespace.credentials import ADMINISTRATOR

    located = locate(replace(cluster, role=ADMINISTRATOR))
    servers = str(located.bootstrap_servers)
    create_acls(KafkaSettings(servers, "headrace-acls", located.broker_properties()), found)
    say(f"the brokers at {servers} have these {len(found)} ACLs now")
