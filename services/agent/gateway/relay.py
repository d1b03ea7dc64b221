"""Forwards the connections of a program in a container to the gateway.

It runs as `python3 -I -S -c TEXT PORT FOLDER`, with any Python from 3.8 on. It is the first process
of the PID namespace that the program shares, and it ends when its connection to the worker ends. So
if the worker dies, the kernel kills the program, too.
"""

import asyncio
import os
import sys


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies one direction of a connection until it ends."""
    try:
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def main() -> None:
    """Serves the port until the connection to the worker ends."""
    port, folder = int(sys.argv[1]), sys.argv[2]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, questions = await asyncio.open_unix_connection(f"{folder}/gateway")
        except OSError:
            writer.close()
            return
        await asyncio.gather(carry(reader, questions), carry(answers, writer))

    alive, worker = await asyncio.open_unix_connection(f"{folder}/lifeline")
    await asyncio.start_server(serve, "127.0.0.1", port)
    worker.write(b"ready\n")
    await alive.read()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
