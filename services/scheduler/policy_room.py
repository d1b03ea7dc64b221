"""How many new groups may start for a policy in training.

The next newest published - newest batch + max_staleness + 1 batches may start to sample now. The
room is what they need, without what they replay, minus the open groups; it is 0 before version 0.
A group is open from its start until it is dropped, too stale for the next batch, or in a batch's
frontier. So filtered and stale groups free their room without a batch.

If batches have a number of tokens, the room is the number of groups that are probably missing. A
live group counts as much as the newest closed ones do on average, and as the longest that the
recipe allows while few are known. If no group is live and the closed ones do not fill a batch,
there is room for one more, so the batch becomes full even if that was wrong.

There is no room either while the trainer has its `prefetch` and two full batches of groups wait.
More groups would only wait and get stale: with a slow trainer, until all are `max_staleness` old.

A policy that waits at the barrier has enough groups, but the slow one may not. So it needs no room,
until `barrier.waiting_batches` full batches of it wait. Then nothing starts, and the slow policy
soon makes a short batch of what it has, as at the end of a run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from statistics import fmean

from headrace.schemas.events import BatchSample
from headrace.schemas.frontier import Frontier
from headrace.schemas.recipe.batch_settings import Batches
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.replay_pool import ReplayPool
from headrace.schemas.staleness import Staleness
from headrace.schemas.version_barrier import held_at_barrier

ENOUGH_BATCHES = 2
"""So many full batches of waiting groups are enough for a trainer that is busy."""
KNOWN_SIZES = 64
"""The mean length of a group is that of the newest closed groups: at most so many, …"""
ENOUGH_SIZES = 16
"""… and at least so many. The first ones to close are shorter than the rest."""


class PolicyRoom:
    """The state of a policy in training."""

    def __init__(self, settings: Batches, longest: int) -> None:
        """`longest` is the largest number of tokens of a group."""
        self._settings = settings
        self._longest = longest
        self._staleness = Staleness(settings.prefetch)
        self._pool = ReplayPool(settings, self._staleness)
        self._sizes: deque[int] = deque(maxlen=KNOWN_SIZES)
        self.batch = 0
        self._closed: dict[int, tuple[int, int]] = {}
        """Open tasks whose group is closed, to the version of the oldest token, which is -1 if one
        is demonstrated, and the number of tokens."""
        self._waiting_tokens = 0
        """The sum of these numbers."""
        self.published: int | None = None
        self.decided = Frontier()
        self.open: set[int] = set()
        """Tasks that were started and are not decided."""

    @property
    def room(self) -> int:
        """How many groups may start now."""
        if self.published is None:
            return 0
        busy = self.batch - self.published >= self._settings.prefetch
        if busy and self.has_closed(ENOUGH_BATCHES):
            return 0
        ahead = self.published - self.batch + self._settings.max_staleness + 1
        room = self._pool.fresh_groups(ahead) - len(self.open)
        return room if self._settings.tokens is None else min(room, self._missing(ahead))

    def start(self, number: int) -> None:
        """Notes that a task was started."""
        if number not in self.decided:
            self.open.add(number)

    def close(self, number: int, oldest: int, tokens: int) -> None:
        """Notes that an open task's group is closed and may be trained on."""
        if number in self.open and number not in self._closed:
            self._closed[number] = (oldest, tokens)
            self._waiting_tokens += tokens
            self._sizes.append(tokens)
            self._drop_if_stale(number)

    def drop(self, number: int) -> None:
        """Frees the room of a task."""
        self.open.discard(number)
        _, tokens = self._closed.pop(number, (0, 0))
        self._waiting_tokens -= tokens

    def on_batch(self, version: int, decided: Frontier, trained: Iterable[BatchSample]) -> None:
        """Notes a batch: the tasks that are decided by then, and what it trains on."""
        if version <= self.batch:
            return
        self.batch = version
        self._pool.on_batch(version, trained)
        self.decided = decided
        for number in [one for one in self.open if one in decided]:
            self.drop(number)
        for number in list(self._closed):
            self._drop_if_stale(number)

    def has_closed(self, batches: int) -> bool:
        """Whether so many full batches of closed groups wait."""
        tokens = self._settings.tokens
        if tokens is not None and self._waiting_tokens >= batches * tokens:
            return True
        return len(self._closed) >= self._pool.fresh_groups(batches)

    def skip(self, version: int) -> None:
        """Notes that a version has the weights of the one before it."""
        self._staleness.skip(version)

    def _missing(self, batches: int) -> int:
        """How many more groups so many batches of `tokens` tokens probably need."""
        assert self._settings.tokens is not None
        if batches <= 0:
            return 0
        live = len(self.open) - len(self._closed)
        known = len(self._sizes) >= ENOUGH_SIZES
        size = fmean(self._sizes) if known else float(self._longest)
        needed = batches * self._settings.tokens - self._replayed(batches)
        missing = (needed - self._waiting_tokens) / size - live
        if live == 0:
            sizes = [tokens for _, tokens in self._closed.values()]
            if self._pool.full_at(sizes) is None:
                return max(1, int(missing) + 1)
        # A batch ends in the middle of a group, not before it.
        return int(missing) + 1 if missing > 0 else 0

    def _replayed(self, batches: int) -> float:
        """How many tokens so many batches replay, if only the first of them may lack some."""
        if self._settings.replay is None or self._settings.tokens is None:
            return 0.0
        usual = self._settings.replay.share * self._settings.tokens
        found = sum(group.tokens for group in self._pool.candidates())
        return (batches - 1) * usual + min(usual, found)

    def _drop_if_stale(self, number: int) -> None:
        """Frees the room of a closed group if no batch can train it any more.

        Only a batch makes groups stale: a skipped version makes none older.
        """
        oldest, _ = self._closed[number]
        if self._staleness.behind(oldest, self.batch) > self._settings.max_staleness:
            self.drop(number)


def has_room(
    recipe: Recipe, policies: Mapping[str, PolicyRoom], published: Mapping[str, int]
) -> bool:
    """Returns whether a training group may start. `published` has the newest version by policy."""
    batches = {name: policy.batch for name, policy in policies.items()}
    held = held_at_barrier(recipe, batches, published)
    most = recipe.barrier.waiting_batches if recipe.barrier is not None else 0
    return all(
        not policy.has_closed(most) if name in held else policy.room > 0
        for name, policy in policies.items()
    )
