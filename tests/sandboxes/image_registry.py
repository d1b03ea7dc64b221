"""A registry of small images with a shell, which counts what is fetched and can be made to fail."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import tarfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
CONFIG = "application/vnd.docker.container.image.v1+json"
APPLETS = ("sh", "sleep", "cat", "echo", "id", "tar", "head", "dd", "ls", "rm", "touch")


class ImageRegistry:
    """Images by repository. All share one layer with a shell, and each has one of its own."""

    def __init__(self, engine_host: str) -> None:
        """Takes the shell from the engine's folder."""
        folder = Path(engine_host.removeprefix("unix://")).parent
        with tarfile.open(folder / "root.tar") as packed:
            found = packed.extractfile("./bin/busybox")
            assert found is not None
            self._shell = _layer({"bin/busybox": found.read()}, APPLETS)
        self._blobs: dict[str, bytes] = {}
        self._manifests: dict[str, bytes] = {}
        self.fetched: Counter[str] = Counter()
        """How often each layer was fetched, by digest."""
        self.failing = False
        """Whether it answers 503."""
        self.released = asyncio.Event()
        """Layers wait for this."""
        self.released.set()
        self.asked = asyncio.Event()
        """Set when a layer is asked for."""
        self.host = ""

    def add(self, repository: str, size: int = 1000, open_to_all: tuple[str, ...] = ()) -> str:
        """Adds an image whose own layer has a file of `size` bytes. Returns its name.

        Every user may write to the folders `open_to_all`.
        """
        own = _layer({"own": repository.encode() + bytes(size)}, (), open_to_all)
        layers = [self._shell, own]
        config = {
            "architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer) for layer in layers]},
        }  # fmt: skip
        packed = [gzip.compress(layer, 1, mtime=0) for layer in layers]
        manifest = {
            "schemaVersion": 2, "mediaType": MANIFEST,
            "config": self._blob(json.dumps(config).encode(), CONFIG),
            "layers": [self._blob(layer, LAYER) for layer in packed],
        }  # fmt: skip
        self._manifests[repository] = json.dumps(manifest).encode()
        return f"{self.host}/{repository}:1"

    def _blob(self, content: bytes, kind: str) -> dict[str, Any]:
        digest = _digest(content)
        self._blobs[digest] = content
        return {"mediaType": kind, "size": len(content), "digest": digest}

    async def answer(self, request: web.Request) -> web.Response:
        """Answers as the API says: https://distribution.github.io/distribution/spec/api/"""
        if self.failing:
            return web.json_response({"errors": [{"code": "UNAVAILABLE"}]}, status=503)
        path = request.path.removeprefix("/v2/")
        if not path:
            return web.Response()
        repository, _, reference = path.partition("/manifests/")
        manifest = self._manifests.get(repository, b"")
        if manifest and reference in ("1", _digest(manifest)):
            headers = {"Docker-Content-Digest": _digest(manifest)}
            return web.Response(body=manifest, content_type=MANIFEST, headers=headers)
        digest = path.rpartition("/")[2]
        if (blob := self._blobs.get(digest)) is None:
            return web.json_response({"errors": [{"code": "MANIFEST_UNKNOWN"}]}, status=404)
        if blob[:2] == b"\x1f\x8b":
            self.fetched[digest] += 1
            self.asked.set()
            await self.released.wait()
        return web.Response(body=blob, content_type="application/octet-stream")


@asynccontextmanager
async def image_registry(engine_host: str) -> AsyncIterator[ImageRegistry]:
    """Yields a running one."""
    registry = ImageRegistry(engine_host)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", registry.answer)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    registry.host = f"127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield registry
    finally:
        registry.released.set()
        await runner.cleanup()


def _layer(
    files: dict[str, bytes], links: tuple[str, ...], open_to_all: tuple[str, ...] = ()
) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for folder in ("bin", "workspace", "tmp", *open_to_all):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o777 if folder in open_to_all else 0o755
            archive.addfile(info)
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755
            archive.addfile(info, io.BytesIO(content))
        for name in links:
            info = tarfile.TarInfo(f"bin/{name}")
            info.type, info.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(info)
    return out.getvalue()


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
