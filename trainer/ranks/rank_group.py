"""Joins the processes that train one model, and notices which of them do not answer."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from headrace.errors import DependencyError, UsageError
from headrace.services.base.concurrency import in_daemon_thread
from headrace.trainer.ranks.ranks import Ranks

POLL_S = 0.02
"""How often a rank looks for what it waits for. Torch would log each wait that takes longer."""
ANSWER_S = 5.0
"""How long the store may take to answer when a rank asks who lives."""
JOIN_S = 600.0
"""How long ranks wait for each other at the start. A rank imports torch first."""
BEAT_S = 1.0
"""How often a rank shows that it lives, unless the time-out is shorter than 20 of them."""


class RankGroup:
    """The place of this process among the ranks. Rank 0 says what all of them do next.

    The ranks talk through a store that one process serves (torch's TCPStore), and through
    collectives: gloo between CPUs, NCCL between GPUs.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float,
        device: str,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits for all ranks to join. A collective ends with an error after `timeout_s` seconds.

        `device` is the type of device that trains. `check` is called now and then while this rank
        waits, and raises an error to end it. Raises DependencyError if a rank does not join.
        """
        self.size = size
        self._rank = rank
        self._store: Any = store  # Its type stub lacks `clone`.
        self._done = 0
        self._timeout_s = timeout_s
        self._beat_s = min(BEAT_S, timeout_s / 20)
        self._ended = threading.Event()
        self._rank_0_lives = threading.Event()
        self._store_answers = threading.Event()
        store.set_timeout(timedelta(seconds=timeout_s))
        try:
            store.set(f"joined/{rank}", "")
            for other in range(size):
                self._await_joined(other, check)
        except (RuntimeError, dist.DistError) as error:
            raise DependencyError(
                f"rank {rank} of {size} can't join the others: {error}"
            ) from error
        self._beating = in_daemon_thread(self._beat, "beats")
        self.ranks = Ranks(rank, size, self._explain)
        with self.ranks.noticing():
            # Torch waits without a limit for a store whose process is stopped.
            connecting = in_daemon_thread(lambda: self._connect(device), "collectives")
            self._wait(connecting, self._while_rank_0_lives(check))

    def tell(self, method: str, *arguments: Any) -> None:
        """Rank 0: has all other ranks do the same as rank 0 does next."""
        with self.ranks.noticing():
            self._store.set(f"command/{self._done}", method)
            if self._done > 1:
                # All have begun the one after it, so all have read it.
                self._store.delete_key(f"command/{self._done - 2}")
            self._done += 1
            dist.broadcast_object_list([arguments], src=0, device=torch.device("cpu"))

    def hear(self, check: Callable[[], None] = lambda: None) -> tuple[str, tuple[Any, ...]]:
        """Other ranks: wait for what rank 0 does next, as long as it lives. Returns what `tell` was
        given.

        Raises DependencyError if rank 0 is gone, or shows no life for `timeout_s`.
        """
        key = f"command/{self._done}"
        with self.ranks.noticing():
            self._await(key, self._while_rank_0_lives(check))
            method = self._store.get(key).decode()
            self._done += 1
            found: list[Any] = [None]
            dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
        return method, found[0]

    def close(self) -> None:
        """Leaves the group. No collective may be under way."""
        self._ended.set()
        with suppress(RuntimeError):
            dist.destroy_process_group()

    def end_beats(self) -> None:
        """Shows no life any more. While a thread is in torch's store, Python's exit may abort."""
        self._ended.set()
        wait((self._beating,), BEAT_S)  # A store whose process is stopped answers nothing.

    def _connect(self, device: str) -> None:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=PrefixStore("collectives", self._store),
            rank=self._rank,
            world_size=self.size,
            timeout=timedelta(seconds=self._timeout_s),
        )

    def _await_joined(self, other: int, check: Callable[[], None]) -> None:
        deadline = time.monotonic() + JOIN_S
        while_store_lives = self._while_alive(self._store_answers, "the process with the store")

        def look() -> None:
            check()
            while_store_lives()
            if time.monotonic() > deadline:
                raise DependencyError(
                    f"rank {other} of {self.size} did not join within {JOIN_S:g} s. Its log says "
                    "why. All ranks start again"
                )

        self._await(f"joined/{other}", look)

    def _while_rank_0_lives(self, check: Callable[[], None]) -> Callable[[], None]:
        """Returns what to call after each beat: it raises RuntimeError if rank 0 has shown no life
        for as long as a collective may take."""
        while_alive = self._while_alive(self._rank_0_lives, "rank 0")

        def look() -> None:
            check()
            while_alive()

        return look

    def _while_alive(self, alive: threading.Event, what: str) -> Callable[[], None]:
        """Returns what to call after each beat. It clears `alive`.

        It raises RuntimeError if `alive` was not set for as long as a collective may take.
        """
        silent = 0  # In beats. What a clock says is wrong if this process was stopped, too.

        def look() -> None:
            nonlocal silent
            silent = 0 if alive.is_set() else silent + 1
            alive.clear()
            if silent * self._beat_s > self._timeout_s:
                raise RuntimeError(f"{what} has shown no life for {self._timeout_s:g} s")

        return look

    def _await(self, key: str, look: Callable[[], None]) -> None:
        """Waits until the store has a key. `look` is called after each beat, and may raise an error
        to end it. A thread asks, because a store whose process is stopped does not answer."""
        given_up = threading.Event()

        def ask() -> None:
            while not self._store.check([key]) and not given_up.wait(POLL_S):
                self._store_answers.set()

        try:
            self._wait(in_daemon_thread(ask, "store"), look)
        finally:
            given_up.set()

    def _wait(self, work: Future[None], look: Callable[[], None]) -> None:
        while not wait((work,), self._beat_s).done:
            look()
        work.result()

    def _beat(self) -> None:
        """Shows the others that this process runs, and notes whether rank 0 does. A stopped process
        shows nothing."""
        number, before = 0, b""
        with suppress(RuntimeError):  # The process that serves the store has ended.
            store = self._store.clone()
            while not self._ended.wait(self._beat_s):
                number += 1
                store.set(f"beat/{self._rank}", str(number))
                if (now := self._beat_of(store, 0)) != before:
                    before = now
                    self._rank_0_lives.set()

    def _explain(self) -> str:
        """Says which ranks show no life now. Those that end because of another rank do not count:
        they have noted before that it failed."""
        found: list[str] = []
        # Torch has no time-out for most requests to a process that is stopped, but not gone.
        asking = threading.Thread(target=lambda: found.append(self._ask_store()), daemon=True)
        asking.start()
        asking.join(ANSWER_S + 3 * self._beat_s)
        no_answer = "the process of rank 0, or the one that serves the store, does not answer"
        return found[0] if found else no_answer

    def _ask_store(self) -> str:
        try:
            store = self._store.clone()
            store.set_timeout(timedelta(seconds=ANSWER_S))
            store.set(f"failed/{self._rank}", "")
            before = self._beats(store)
            time.sleep(3 * self._beat_s)
            after = self._beats(store)
            silent = [
                str(rank)
                for rank in range(self.size)
                if before[rank] == after[rank] and not store.check([f"failed/{rank}"])
            ]
        except RuntimeError:
            return "the process of rank 0, or the one that serves the store, is gone"
        if silent:
            many = len(silent) > 1
            named = ", ".join(silent)
            return f"ranks {named} do not answer" if many else f"rank {named} does not answer"
        return "another rank failed, and its log says why"

    def _beats(self, store: Store) -> list[bytes]:
        return [self._beat_of(store, rank) for rank in range(self.size)]

    def _beat_of(self, store: Store, rank: int) -> bytes:
        name = f"beat/{rank}"
        return store.get(name) if store.check([name]) else b""


def serve_store() -> tuple[TCPStore, int]:
    """Serves a store to processes of this machine alone. Returns it and its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def loopback_variables() -> dict[str, str]:
    """Returns the variables with which torch's collectives use the loopback interface."""
    name = "lo" if sys.platform == "linux" else "lo0"
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


def outside_rank(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Returns rank and number of ranks if `torchrun` or another program has started them."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    return int(environment["RANK"]), int(environment["WORLD_SIZE"])


def own_gpu(device: str, rank: int) -> None:
    """Chooses the GPU of a rank: the one with its number on this machine.

    Raises UsageError if this machine has no GPU with this number.
    """
    if device != "cpu" and torch.cuda.is_available():
        number = int(os.environ.get("LOCAL_RANK", rank))
        check_gpus(device, number + 1)
        torch.cuda.set_device(number)


def check_gpus(device: str, processes: int) -> None:
    """Raises UsageError if so many processes of this machine can't have one GPU each."""
    if device == "cpu" or not torch.cuda.is_available():
        return
    gpus = torch.cuda.device_count()
    if gpus < processes:
        raise UsageError(
            f"training.processes: {processes} processes of this machine need one GPU each, and it "
            f"shows {gpus}. Set training.processes to at most {gpus}, or make more GPUs visible "
            "with CUDA_VISIBLE_DEVICES"
        )
