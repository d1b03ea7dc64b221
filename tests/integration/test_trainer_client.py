"""The client of other teams' trainers on a real broker: signed versions, fencing, the run's end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from headrace import Fenced, TrainerClient, UsageError
from headrace.infra import local
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.signatures import KEY_VARIABLE, public_text, write_private_key
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import connect
from headrace.services.operate.conformance.trainer.fed_namespace import (
    TICK_S,
    FedNamespace,
    fed_namespace,
)

BOUND_S = 120.0
WEIGHTS = np.arange(64, dtype=np.float32)


async def until(fed: FedNamespace, version: int) -> None:
    async with asyncio.timeout(BOUND_S):
        while fed.newest < version:
            await asyncio.sleep(TICK_S)


def test_a_client_publishes_signed_versions_until_another_one_or_the_end(
    local_stack: local.LocalStack, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = write_private_key(tmp_path / "key.pem")
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "key.pem"))
    learner = {
        "model": "tiny-llama", "training": {"external": True}, "signers": [public_text(key)],
    }  # fmt: skip
    recipe = Recipe.model_validate({"name": "signed", "policies": {"default": learner}})
    address = (local_stack.bootstrap_servers, local_stack.registry_url)
    cluster = ClusterConfig(state=tmp_path).connected(*address)

    def open_client() -> TrainerClient:
        return TrainerClient(
            bootstrap=address[0], registry=address[1], namespace=namespace, state=tmp_path
        )

    def train(client: TrainerClient, version: int) -> None:
        batch = next(client.batches())
        assert (batch.version, batch.published, batch.tokens) == (version, False, 96)
        client.publish(version, {"w": WEIGHTS + version}, {"loss": 0.25})

    async def scenario() -> None:
        async with connect(cluster, "test") as connection:
            async with fed_namespace(connection, recipe, "default", namespace) as fed:
                first = await asyncio.to_thread(open_client)
                assert first.newest is None
                assert (first.model_folder / "config.json").exists()
                await asyncio.to_thread(first.publish, 0, {"w": WEIGHTS})
                await fed.feed(1)
                await asyncio.to_thread(train, first, 1)
                await until(fed, 1)  # Unsigned records would not count.
                second = await asyncio.to_thread(open_client)
                assert second.newest == 1
                await fed.feed(2)
                assert (await asyncio.to_thread(next, first.batches())).version == 2
                with pytest.raises(Fenced):
                    await asyncio.to_thread(first.publish, 2, {"w": WEIGHTS})
                await asyncio.to_thread(first.close)
                await asyncio.to_thread(second.publish, 0, {"w": WEIGHTS})
                again = await asyncio.to_thread(next, second.batches())
                assert (again.version, again.published) == (1, True)
                await asyncio.to_thread(second.publish, 1, {"w": WEIGHTS + 1})
                await asyncio.to_thread(train, second, 2)
                await until(fed, 2)
                assert [one.status for one in fed.seen] == ["initial", "trained", "trained"]
                assert fed.seen[2].metrics["loss"] == 0.25
            # Leaving the context ended the run, so a client that waits for a batch stops waiting.
            assert await asyncio.to_thread(list, second.batches()) == []
            await asyncio.to_thread(second.close)
            with pytest.raises(UsageError, match="has ended"):
                await asyncio.to_thread(open_client)

    asyncio.run(asyncio.wait_for(scenario(), BOUND_S))


def test_stop_ends_the_batches(
    local_stack: local.LocalStack, namespace: str, tmp_path: Path
) -> None:
    learner = {"model": "tiny-llama", "training": {"external": True}}
    recipe = Recipe.model_validate({"name": "stopped", "policies": {"default": learner}})
    address = (local_stack.bootstrap_servers, local_stack.registry_url)

    def wait_for_nothing() -> list[object]:
        with TrainerClient(
            bootstrap=address[0], registry=address[1], namespace=namespace, state=tmp_path
        ) as client:
            client.publish(0, {"w": WEIGHTS})
            threading.Timer(0.5, client.stop).start()
            return list(client.batches())

    async def scenario() -> None:
        cluster = ClusterConfig(state=tmp_path).connected(*address)
        async with (
            connect(cluster, "test") as connection,
            fed_namespace(connection, recipe, "default", namespace),
        ):
            assert await asyncio.to_thread(wait_for_nothing) == []

    asyncio.run(asyncio.wait_for(scenario(), BOUND_S))


def test_the_client_imports_no_torch() -> None:
    script = "import sys; from headrace import TrainerClient, plan; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=BOUND_S, check=True
    )
    assert done.stdout.strip() == "False"
