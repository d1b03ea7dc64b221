"""Where the environments of one episode are. Pure.

An agent worker chooses the partition of an attempt's reset. The choice is not recorded before the
environment answers. So if the agent worker dies before that, its successor may choose another
partition, and the attempt has two environments. Each answer says from which partition it came: the
first one in the log decides which environment is the attempt's, for every reader. The other one is
closed when it answers.
"""

from __future__ import annotations

from headrace.schemas.events import ObservationRecorded
from headrace.services.agent.routing.action_routes import Location


class EpisodeLocations:
    """The locations of an episode's attempts."""

    __slots__ = ("_answered", "_closed", "_over", "_sent")

    def __init__(self) -> None:
        self._answered: dict[int, Location] = {}
        self._closed: dict[int, int] = {}
        self._over = False
        self._sent: dict[int, Location] = {}

    def on_answer(self, answer: ObservationRecorded) -> bool:
        """Takes the answers in the order of the log.

        Returns whether the environment that gave this one is not the attempt's, and must be closed.
        The attempt's is the one that was closed, if none had answered before that. Once the episode
        is over, all others must be closed.
        """
        if answer.partition < 0:
            return False
        if self._over or answer.attempt in self._closed:
            return self._closed.get(answer.attempt) != answer.partition
        location = Location(answer.instance, answer.partition)
        return self._answered.setdefault(answer.attempt, location).partition != answer.partition

    def sent(self, attempt: int, location: Location) -> None:
        """Notes where an attempt's reset is sent."""
        self._sent[attempt] = location

    def closed(self, attempt: int, partition: int) -> None:
        """Notes where an attempt's `close` is sent."""
        self._closed[attempt] = partition

    def end(self) -> None:
        """Notes that the episode is over: it sends no `close` any more."""
        self._over = True

    def location(self, attempt: int) -> Location | None:
        """Returns where an attempt's environment is, or None if it has no environment yet."""
        return self._answered.get(attempt) or self._sent.get(attempt)

    def workers(self) -> set[str]:
        """Returns the workers that had an environment of the episode."""
        return {location.worker for location in (*self._answered.values(), *self._sent.values())}
