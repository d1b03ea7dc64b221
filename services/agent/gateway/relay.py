"""Forwards the connections of a program in a container to the gateway.

It runs as `python3 -I -S -c TEXT PORT FOLDER`, with any Python from 3.8 on. It is the first process
of the PID namespace that the program shares, and it ends when its connection to the worker ends. So
if the worker dies, the kernel kills the program, too. Code of the policy may use the port, so the
relay bounds what it holds: it reads only what it can pass on, and closes further connections.
"""

import asyncio
import os
import socket
import sys
from contextlib import suppress

CONNECTIONS = 256
"""Most connections at once, as at the gateway."""
CHUNK_BYTES = 16384
PAUSE_S = 0.05
BUFFER_BYTES = 65536
"""What the kernel may hold of one direction of a connection."""


async def carry(source: socket.socket, target: socket.socket) -> None:
    """Copies one direction of a connection until it ends, and then ends the other side."""
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while chunk := await loop.sock_recv(source, CHUNK_BYTES):
            await loop.sock_sendall(target, chunk)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


async def serve(client: socket.socket, path: str) -> None:
    """Connects a client to the gateway until one of them ends the connection."""
    with client, socket.socket(socket.AF_UNIX) as gateway:
        client.setblocking(False)
        gateway.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(gateway, path)
        except OSError:
            return
        await asyncio.gather(carry(client, gateway), carry(gateway, client))


async def accept(listener: socket.socket, path: str) -> None:
    """Serves clients, up to CONNECTIONS at once."""
    serving: set[asyncio.Future[None]] = set()
    while True:
        try:
            client, _ = await asyncio.get_running_loop().sock_accept(listener)
        except OSError:  # for example, the client is gone already
            await asyncio.sleep(PAUSE_S)
            continue
        if len(serving) >= CONNECTIONS:
            client.close()
            continue
        task = asyncio.ensure_future(serve(client, path))
        serving.add(task)
        task.add_done_callback(serving.discard)


async def main() -> None:
    """Serves the port until the connection to the worker ends."""
    port, folder = int(sys.argv[1]), sys.argv[2]
    alive, worker = await asyncio.open_unix_connection(folder + "/lifeline")
    listener = socket.socket()
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        listener.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    listener.bind(("127.0.0.1", port))
    listener.listen(CONNECTIONS)
    listener.setblocking(False)
    accepting = asyncio.ensure_future(accept(listener, folder + "/gateway"))
    worker.write(b"ready\n")
    await alive.read()
    accepting.cancel()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
