"""A program in the place of `ssh`, which does what the variable FAKE_SSH says.

`forwards` forwards a socket as `ssh -N -L LOCAL:REMOTE` does, to a socket of this host, and `warns`
does so after a warning. Any other text is what it complains of before it ends; `hangs` never gets
so far.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

FAR = "far"


def main() -> None:
    with open(os.environ["FAKE_SSH_LOG"], "a") as log:
        print(os.getpid(), *sys.argv[1:], file=log)
    does = Path(os.environ["FAKE_SSH"]).read_text()
    if does == "hangs":
        time.sleep(600)
    if does == "warns":
        print("this server is slow", file=sys.stderr, flush=True)
    elif does != "forwards":
        sys.exit(f"banner\n\n{does}")
    near, far = sys.argv[sys.argv.index("-L") + 1].split(":")
    assert sys.argv[-1] == FAR
    assert os.environ["SSH_ASKPASS_REQUIRE"] == "never"
    asyncio.run(forward(near, far))


async def forward(near: str, far: str) -> None:
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inside, to_inside = await asyncio.open_unix_connection(far)
        except OSError:
            print("channel 2: open failed: connect failed: not there", file=sys.stderr, flush=True)
            writer.close()
            return
        await asyncio.gather(pump(reader, to_inside), pump(inside, writer))

    async with await asyncio.start_unix_server(relay, near) as server:
        await server.serve_forever()


if __name__ == "__main__":
    main()
