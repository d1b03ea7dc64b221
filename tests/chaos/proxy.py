"""A TCP proxy between the services and one broker: it delays, cuts connections, drops replies."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast


class Proxy:
    """Forwards connections from `port` to the broker's, as told by `delay_s` and `mute`."""

    def __init__(self, target: int) -> None:
        self.delay_s = 0.0
        """Seconds that bytes of either direction take longer."""
        self.bytes_per_s: float | None = None
        """What the link lets through in each direction, over all connections. None: everything."""
        self._free_at = [0.0, 0.0]
        """When the link has sent what it has, to the broker and from it."""
        self.port = 0
        self._target = target
        self._mute = False
        self._server: asyncio.Server | None = None
        self._sides: set[_Side] = set()

    async def start(self) -> None:
        """Listens on a free port of 127.0.0.1."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Side(self), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> int:
        """Resets every connection. How many there were."""
        sides = list(self._sides)
        for side in sides:
            side.abort()
        return len(sides) // 2

    def mute(self) -> None:
        """From here on requests arrive and replies are lost."""
        self._mute = True

    def unmute(self) -> None:
        """Ends that. The connections are reset: what is left of a reply can't be understood."""
        self._mute = False
        self.cut()

    def send(self, size: int, now_s: float, *, back: bool) -> float:
        """Returns when the link has sent so many bytes."""
        if self.bytes_per_s is None:
            return now_s
        self._free_at[back] = max(now_s, self._free_at[back]) + size / self.bytes_per_s
        return self._free_at[back]

    async def close(self) -> None:
        """Listens no more and resets every connection."""
        if self._server is not None:
            self._server.close()
        while self._sides:  # each is told of its end in a turn of the loop
            self.cut()
            await asyncio.sleep(0)


class _Side(asyncio.Protocol):
    """One end of a forwarded connection: the client's, or the broker's where `peer` is given."""

    def __init__(self, proxy: Proxy, peer: _Side | None = None) -> None:
        self._proxy = proxy
        self._peer = peer
        self._from_broker = peer is not None
        self._transport: asyncio.Transport | None = None
        self._delayed: deque[tuple[float, bytes]] = deque()
        """What is to be written to the peer, and when."""
        self._early: list[bytes] = []
        """What came before the broker's side was there."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._proxy._sides.add(self)
        if self._peer is None:
            self._connecting = asyncio.ensure_future(self._connect())
        else:
            self._peer._peer = self
            early, self._peer._early = self._peer._early, []
            for data in early:
                self._peer.data_received(data)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(
                lambda: _Side(self._proxy, self), "127.0.0.1", self._proxy._target
            )
        except OSError:
            self.abort()

    def data_received(self, data: bytes) -> None:
        if self._peer is None:
            self._early.append(data)
        elif self._from_broker and self._proxy._mute:
            return
        elif self._proxy.delay_s or self._proxy.bytes_per_s or self._delayed:
            loop = asyncio.get_running_loop()
            # Never before what came before it, though the delay may have shrunk since.
            last = self._delayed[-1][0] if self._delayed else 0.0
            sent_s = self._proxy.send(len(data), loop.time(), back=self._from_broker)
            self._delayed.append((max(last, sent_s + self._proxy.delay_s), data))
            if len(self._delayed) == 1:
                loop.call_at(self._delayed[0][0], self._write_due)
        else:
            self._peer.write(data)

    def _write_due(self) -> None:
        loop = asyncio.get_running_loop()
        while self._delayed and self._delayed[0][0] <= loop.time():
            data = self._delayed.popleft()[1]
            if self._peer is not None:
                self._peer.write(data)
        if self._delayed:
            loop.call_at(self._delayed[0][0], self._write_due)

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def pause_writing(self) -> None:
        if self._peer is not None and self._peer._transport is not None:
            self._peer._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._peer is not None and self._peer._transport is not None:
            self._peer._transport.resume_reading()

    def connection_lost(self, _: Exception | None) -> None:
        self._proxy._sides.discard(self)
        self._transport = None
        if self._peer is not None:
            self._peer.abort()

    def abort(self) -> None:
        """Ends this side, which ends the other."""
        if self._transport is not None:
            self._transport.abort()
