"""Opens a namespace for a service: its topics, its blob store and its folder on this machine."""

from __future__ import annotations

import asyncio

from headrace.errors import UsageError
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import Topics
from headrace.services.base.files import private_folder
from headrace.services.kafka.broker import Broker
from headrace.services.models.blob_owners import owner_name
from headrace.services.models.blobs import BlobStore
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import Connection
from headrace.services.namespace.lookup import topics_of
from headrace.services.operate.run_references import blobs_of
from headrace.services.worker.service_context import ServiceContext


async def open_context(
    connection: Connection,
    recipe: Recipe,
    cluster: ClusterConfig,
    stopping: asyncio.Event,
    ending: asyncio.Event,
    draining: asyncio.Event,
) -> ServiceContext:
    """Returns what a service gets. `cluster` names the namespace.

    Raises UsageError if the namespace is missing, and DependencyError if the registry does not
    answer.
    """
    assert cluster.namespace is not None
    topics = topics_of(recipe, cluster.namespace)
    await require_topics(connection.broker, topics)
    log = await connection.writing_log(topics)
    cluster_id = await connection.broker.cluster_id()
    folder = cluster.cluster_folder(cluster.namespace, cluster_id)
    private_folder(folder)
    blobs = cluster.open_blobs(owner_name(cluster_id, cluster.namespace))
    return ServiceContext(
        log, recipe, blobs, connection.source, folder, stopping, ending, draining=draining
    )


def claim_models(recipe: Recipe, blobs: BlobStore) -> None:
    """Marks the blobs of versions that the recipe refers to as needed by its namespace."""
    for blob in blobs_of((policy.model for policy in recipe.policies.values()), blobs):
        blobs.claim(blob)


async def require_topics(broker: Broker, topics: Topics) -> None:
    """Raises UsageError if a topic is missing or has another number of partitions."""
    existing = await broker.list_topics()
    for topic in topics:
        found = existing.get(topic.name)
        if found is None:
            raise UsageError(
                f"the broker has no topic {topic.name}: create the namespace with "
                "`headrace apply RECIPE`, or choose another one with --namespace"
            )
        if found != topic.partitions:
            raise UsageError(
                f"topic {topic.name} has {found} partitions, but the recipe says "
                f"{topic.partitions}. A namespace keeps its partitions: use another --namespace"
            )
