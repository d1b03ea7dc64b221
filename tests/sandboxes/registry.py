"""A registry of one small image, for who has its password."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

IMAGE = "team/hello"
USER = "reader"
PASSWORD = "of the registry"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


def _layer() -> bytes:
    """An archive of one file."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("hello")
        info.size = 5
        archive.addfile(info, io.BytesIO(b"hello"))
    return out.getvalue()


def _digest(text: bytes) -> str:
    return f"sha256:{hashlib.sha256(text).hexdigest()}"


def _image() -> tuple[bytes, dict[str, bytes]]:
    """Its manifest, and what that names by digest."""
    layer = _layer()
    packed = gzip.compress(layer, mtime=0)
    rootfs = {"type": "layers", "diff_ids": [_digest(layer)]}
    config = json.dumps(
        {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs}
    ).encode()
    kind = "application/vnd.docker.{}"

    def named(text: bytes, media: str) -> dict[str, Any]:
        return {"mediaType": kind.format(media), "size": len(text), "digest": _digest(text)}

    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": named(config, "container.image.v1+json"),
        "layers": [named(packed, "image.rootfs.diff.tar.gzip")],
    }
    return json.dumps(manifest).encode(), {_digest(text): text for text in (config, packed)}


def digest() -> str:
    """The digest of the image's manifest."""
    return _digest(_image()[0])


@asynccontextmanager
async def registry() -> AsyncIterator[str]:
    """A running one: its host and port."""
    manifest, blobs = _image()
    expected = "Basic " + b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    async def answer(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != expected:
            headers = {"WWW-Authenticate": 'Basic realm="test"'}
            return web.json_response(_error("UNAUTHORIZED"), status=401, headers=headers)
        rest = request.path.removeprefix("/v2/")
        if rest in ("", f"{IMAGE}/manifests/1", f"{IMAGE}/manifests/{_digest(manifest)}"):
            headers = {"Docker-Content-Digest": _digest(manifest)}
            return web.Response(body=manifest, content_type=MANIFEST, headers=headers)
        if (blob := blobs.get(rest.rpartition("/")[2])) is not None:
            return web.Response(body=blob, content_type="application/octet-stream")
        return web.json_response(_error("MANIFEST_UNKNOWN"), status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _error(code: str) -> dict[str, Any]:
    return {"errors": [{"code": code, "message": code.lower()}]}
