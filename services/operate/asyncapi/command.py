"""`headrace asyncapi`: writes the contract of a namespace as an AsyncAPI document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    in_namespace,
    print_json,
    set_option,
)

if TYPE_CHECKING:
    from headrace.services.log.event_log import EventLog
    from headrace.services.namespace.run_life import RunLife


@click.command()
@click.argument("recipe", required=False)
@set_option
@cluster_options
def asyncapi(recipe: str | None, settings: tuple[str, ...], **options: Any) -> None:
    """Write the contract of a namespace as an AsyncAPI 3 document, in JSON.

    Other teams join a run by its topics. The document has every topic with its real name, event,
    Avro schema, key, headers, partitions and retention, who writes it, and examples. With a RECIPE
    it needs no broker. Without one, it describes the run of the namespace.

    The document names the brokers, the registry and the security scheme that the options name, and
    none without --bootstrap-servers. It has no passwords.

    \b
    Examples:
      headrace asyncapi quickstart > asyncapi.json
      headrace asyncapi my.toml --namespace exp-7 --bootstrap-servers broker:9092 \\
          --registry-url http://registry:8081
      headrace asyncapi --namespace exp-7
    """
    from headrace.services.namespace.cluster_config import read_recipe
    from headrace.services.namespace.lookup import topics_of
    from headrace.services.operate.asyncapi.contract_document import contract_document

    cluster = cluster_of(dict(options))
    if recipe is not None:
        resolved = read_recipe(recipe, settings)
        topics = topics_of(resolved, cluster.namespace or resolved.name)
        print_json(contract_document(topics, resolved, cluster))
        return
    if settings:
        raise click.UsageError("--set needs a recipe to change: give its RECIPE too")

    async def describe(log: EventLog, life: RunLife) -> Any:
        return contract_document(log.topics, life.recipe(), cluster)

    print_json(in_namespace(options, "asyncapi", describe))
