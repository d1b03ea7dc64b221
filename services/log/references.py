"""Which references a log accepts: any program that may write a topic can name any record in them.

Whoever follows a reference reads with rights of its own, so a reference of another team must not
lead it into topics that the team itself may not read.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.errors import DecodeError
from headrace.schemas.events import (
    BatchAssembled,
    EpisodeEnded,
    Event,
    GroupClosed,
    ObservationRecorded,
    Ref,
    TaskEnded,
)
from headrace.schemas.topics import ACTIONS, TRAJECTORIES, Topic, Topics, topic_of


def check_trajectories(event: Event, topics: Topics, value: bytes | None) -> None:
    """Checks the references of an event to trajectories. `value` is the bytes of its record.

    Raises DecodeError if one names another topic than `trajectories`, a namespace that the log may
    not read, or a partition that its own namespace does not have.
    """
    partitions: dict[str, int] = {}
    for ref in _trajectories(event):
        partitions[ref.topic] = max(ref.partition, partitions.get(ref.topic, 0))
    for name, highest in partitions.items():
        if readable_topic(name, topics, value).name != TRAJECTORIES.name:
            raise DecodeError(f"a reference to a trajectory names {name}", value)
        own = name == topics.name(TRAJECTORIES)
        if own and highest >= (most := topics.by_name(name).partitions):
            raise DecodeError(
                f"a reference names {name}/{highest}, but that topic has {most} partitions", value
            )


def check_partition(event: Event, topics: Topics, value: bytes | None) -> None:
    """Checks the partition that an environment's answer names for the next actions.

    Raises DecodeError if `actions` has no such partition: nobody could send an action there.
    """
    if isinstance(event, ObservationRecorded) and event.partition >= topics.action_partitions:
        raise DecodeError(
            f"an answer names partition {event.partition} of {topics.name(ACTIONS)}, which has "
            f"{topics.action_partitions} partitions",
            value,
        )


def readable_topic(name: str, topics: Topics, value: bytes | None = None) -> Topic[Event]:
    """Returns the topic that a reference names.

    Raises DecodeError if it is not a topic of Headrace, or is in a namespace that the log may not
    read.
    """
    try:
        topic = topic_of(name)
    except KeyError:
        raise DecodeError(
            f"a reference names {name}, which is not a topic of Headrace", value
        ) from None
    namespace = name.partition(".")[0]
    if namespace != topics.namespace and namespace not in topics.reads_from:
        raise DecodeError(
            f"a reference names {name}, but `reads_from` of the recipe does not name the "
            f"namespace {namespace!r}",
            value,
        )
    return topic


def _trajectories(event: Event) -> Iterable[Ref]:
    match event:
        case GroupClosed() | BatchAssembled():
            return [sample.trajectory for sample in event.samples]
        case TaskEnded():
            return [one.trajectory for one in event.outcomes if one.trajectory is not None]
        case EpisodeEnded(trajectory=Ref() as ref):
            return [ref]
    return ()
