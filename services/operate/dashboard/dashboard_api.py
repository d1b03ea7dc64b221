"""What each address of the API answers, as JSON values. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from headrace.errors import HeadraceError, UsageError
from headrace.schemas.events import Blob, TrajectoryRecorded
from headrace.schemas.topics import (
    EPISODES,
    GROUPS,
    OUTCOMES,
    RESULTS,
    TASKS,
    TRAJECTORIES,
    Topic,
)
from headrace.services.base.clock import now
from headrace.services.log.unpacked import Texts
from headrace.services.models.blobs import BlobStore
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import Connection
from headrace.services.namespace.lookup import namespaces_in, topics_in
from headrace.services.namespace.run_life import RunLife, read_life, read_lives
from headrace.services.operate.compare.compare import compare
from headrace.services.operate.dashboard.index.index_follower import IndexFollower
from headrace.services.operate.dashboard.index.run_index import RunIndex
from headrace.services.operate.dashboard.views import log_views, run_views
from headrace.services.operate.dashboard.views.cut_texts import Tree
from headrace.services.operate.dashboard.views.episode_list import episodes_tree, find_episodes
from headrace.services.operate.dashboard.views.episode_view import EpisodePage
from headrace.services.operate.dashboard.views.fact_reader import FactReader, task_row
from headrace.services.operate.dashboard.views.group_view import group_tree
from headrace.services.operate.dashboard.views.kept_list import KeptList
from headrace.services.operate.dashboard.views.page_of import page_of, whole_number
from headrace.services.operate.dashboard.views.token_strip import (
    MOST_TOKENS,
    Decode,
    strip_tree,
)
from headrace.services.operate.dashboard.views.trainer_logprobs import TrainerLogprobs
from headrace.services.operate.dashboard.views.version_comparison import (
    compare_runs,
    compare_versions,
)
from headrace.services.operate.dashboard.views.version_view import version_tree
from headrace.services.operate.show.facts import Fact
from headrace.services.operate.show.task_story import make_task_story

T = TypeVar("T")
Query = Mapping[str, str]

STRIP = 4_000
MOST_RUNS = 200
IMAGES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
"""Files that a browser may show. All others are downloads."""
GROUP_TOPICS: tuple[Topic[Any], ...] = (TASKS, EPISODES, OUTCOMES, RESULTS, GROUPS, TRAJECTORIES)


class DashboardApi:
    """The pages of one run."""

    def __init__(
        self,
        connection: Connection,
        cluster: ClusterConfig,
        follower: IndexFollower,
        reader: FactReader,
        blobs: BlobStore,
    ) -> None:
        self.reader = reader
        self._log = reader.log
        self._connection = connection
        self._cluster = cluster
        self._follower = follower
        self._blobs = blobs
        self._episodes = KeptList(find_episodes)
        self._discarded = KeptList(run_views.discarded_rows)
        self._texts = Texts(follower.index.recipe)
        # One page at a time is made of long texts, so that they don't add up in memory.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pages")

    @property
    def index(self) -> RunIndex:
        """The index, as far as it was read."""
        return self._follower.index

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run(self, _: Query) -> Tree:
        """Answers /api/run."""
        return run_views.run_tree(self._log.topics.namespace, self._follower)

    async def series(self, query: Query) -> Tree:
        """Answers /api/series."""
        return run_views.series_tree(self.index, query)

    async def times(self, query: Query) -> Tree:
        """Answers /api/times."""
        return run_views.times_tree(self._follower, query)

    async def versions(self, query: Query) -> Tree:
        """Answers /api/versions, the newest first."""
        series = self.index.series[run_views.policy_of(self.index, query)]
        rows = sorted(series.rows, reverse=True)
        return page_of(rows, query, lambda version: run_views.version_row(series, version))

    async def version(self, query: Query, policy: str, version: int) -> Tree:
        """Answers /api/versions/POLICY/N."""
        return await version_tree(self.index, self.reader, self._blobs, policy, version, query)

    async def group(self, _: Query, task: int) -> Tree:
        """Answers /api/groups/TASK."""
        row = task_row(self.index, task)
        facts, remarks = await self.reader.of_task(self.index, task, topics=GROUP_TOPICS)
        return group_tree(row, make_task_story(task, facts), remarks)

    async def episodes(self, query: Query) -> Tree:
        """Answers /api/episodes."""
        return await episodes_tree(self.index, self.reader, self._episodes, query)

    async def episode(self, query: Query, task: int, sample: int) -> Tree:
        """Answers /api/episodes/TASK/SAMPLE."""
        row = task_row(self.index, task)
        if sample not in row.samples:
            raise UsageError(f"task {task} has no sample {sample}")
        wanted = whole_number(query, "attempt", -1, -1)
        first = whole_number(query, "first_turn", 0)
        facts, remarks = await self.reader.of_task(self.index, task, sample)

        def make() -> Tree:
            story = make_task_story(task, facts, sample)
            page = EpisodePage(row, story, sample, self._texts.of, remarks)
            return page.tree(None if wanted < 0 else wanted, first)

        return await self._in_thread(make)

    async def tokens(self, query: Query, task: int, sample: int) -> Tree:
        """Answers /api/episodes/TASK/SAMPLE/tokens."""
        row = task_row(self.index, task)
        episode = row.samples.get(sample)
        wanted = whole_number(query, "attempt", -1, -1)
        found = episode.attempt if episode is not None else None
        if episode is not None and wanted >= 0:
            found = episode.by_attempt.get(wanted)
        if episode is None or found is None:
            raise UsageError(f"episode {task}/{sample} has no trajectory yet, or no such attempt")
        fact = await self.reader.one(self.index.positions.unpack(found.position))
        if fact is None or not isinstance(fact.event, TrajectoryRecorded):
            raise UsageError(f"the trajectory of episode {task}/{sample} is gone from the log")
        event = fact.event
        branch = whole_number(query, "branch", -1, -1, max(0, len(event.turns) - 1))
        finder = TrainerLogprobs(self.index, self.reader, self._blobs)
        trainer, remarks = await finder.of(cast("Fact[TrajectoryRecorded]", fact), episode)

        def decoder(policy: str) -> Decode:
            return lambda ids: self._texts.of_ids(policy, ids, event.tokenizer)

        def make() -> Tree:
            tree = strip_tree(
                event,
                decoder,
                trainer,
                branch=None if branch < 0 else branch,
                first=whole_number(query, "from", 0),
                limit=whole_number(query, "limit", STRIP, 1, MOST_TOKENS),
                masked=episode.masked,
            )
            return tree | {"remarks": remarks}

        return await self._in_thread(make)

    async def tools(self, query: Query) -> Tree:
        """Answers /api/tools."""
        return run_views.tools_tree(self.index, query)

    async def discarded(self, query: Query) -> Tree:
        """Answers /api/discarded."""
        return run_views.discarded_tree(self.index, self._discarded, query)

    async def workers(self, _: Query) -> Tree:
        """Answers /api/workers."""
        rows = self.index.workers.workers(now())
        sandboxes = self.index.workers.sandboxes(now())
        versions: Tree = {
            name: {"newest": series.newest, "served": {}}
            for name, series in self.index.series.items()
        }
        for pool in (pool for row in rows if row["alive"] for pool in row["pools"]):
            if pool["policy"] in versions and pool["version"] >= 0:
                served = versions[pool["policy"]]["served"]
                served[str(pool["version"])] = served.get(str(pool["version"]), 0) + 1
        return {
            "workers": rows[:500],
            "workers_total": len(rows),
            "sandboxes": sandboxes[:500],
            "sandboxes_total": len(sandboxes),
            "versions": versions,
        }

    async def topics(self, _: Query) -> Tree:
        """Answers /api/topics."""
        return await log_views.topics_tree(self._log)

    async def record(self, query: Query) -> Tree:
        """Answers /api/record."""
        return await log_views.record_tree(self._log, query.get("at", ""))

    async def records(self, query: Query) -> Tree:
        """Answers /api/records."""
        return await log_views.records_tree(self._log, query)

    async def dead_letters(self, query: Query) -> Tree:
        """Answers /api/dead-letters."""
        kinds = self.index.dead_letters.kinds()
        return await log_views.dead_letters_tree(self._log, kinds, query)

    async def dead_letter(self, _: Query, number: int) -> Tree:
        """Answers /api/dead-letters/N."""
        return await log_views.dead_letter_tree(self._log, number)

    async def text(self, query: Query) -> Tree:
        """Answers /api/text."""
        at, field = query.get("at", ""), query.get("field", "")
        return await log_views.whole_text(self.reader, self._texts, at, field)

    async def runs(self, _: Query) -> Tree:
        """Answers /api/runs, the newest first."""
        items = [
            {
                "namespace": name,
                "state": life.state,
                "started_at": life.started_at or None,
                "recipe": life.recipe().name if life.started is not None else "",
                "replay_of": life.replay_of,
                "current": name == self._log.topics.namespace,
            }
            for name, life in (await self._lives()).items()
        ]
        items.sort(key=lambda one: -float(one["started_at"] or 0))
        return {"items": items, "total": len(items), "next": None}

    async def _lives(self) -> dict[str, RunLife]:
        """Returns the lives of the runs on this broker that can be read."""
        existing = await self._log.broker.list_topics()
        logs = {}
        for name in namespaces_in(existing)[:MOST_RUNS]:
            with suppress(UsageError):  # It is being made or deleted.
                logs[name] = self._connection.log(topics_in(existing, name))
        try:
            return dict(zip(logs, await read_lives(list(logs.values())), strict=True))
        except HeadraceError:
            lives = {}
            for name, log in logs.items():
                with suppress(HeadraceError):  # This principal may not read it, or it was deleted.
                    lives[name] = await read_life(log)
            return lives

    async def compare(self, query: Query) -> Tree:
        """Answers /api/compare."""
        policy = run_views.policy_of(self.index, query)
        if not (other := query.get("run")):
            first, second = (whole_number(query, name, -1) for name in ("first", "second"))
            if min(first, second) < 0:
                raise UsageError("give first and second, two versions, or run, another namespace")
            return compare_versions(self.index, policy, first, second)
        cluster = replace(self._cluster, namespace=self._log.topics.namespace)
        return compare_runs(await compare(cluster, [other], policy, lambda line: None))

    async def artifact(self, query: Query, sha256: str) -> tuple[Blob, Path]:
        """Returns a file of a task or an episode, and its path on this machine.

        Raises UsageError unless the task or the episode has the file: nothing else is given out.
        """
        task = whole_number(query, "task", -1, 0)
        sample = whole_number(query, "sample", -1, -1)
        facts, _ = await self.reader.of_task(self.index, task, None if sample < 0 else sample)
        for fact in facts:
            for blob in getattr(fact.event, "artifacts", ()):
                if blob.sha256.hex() == sha256:
                    return blob, await asyncio.to_thread(self._blobs.get, blob)
        raise UsageError(f"task {task} has no file {sha256}")

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
