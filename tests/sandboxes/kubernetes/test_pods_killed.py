"""The env worker is killed with live pods: they are found again, and none is left."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from headrace.infra import local
from tests.sandboxes.docker_engine import IMAGE
from tests.sandboxes.kubernetes.cluster import REFERENCE, Cluster
from tests.sandboxes.test_env_killed import RECIPE, kill_again_and_again

KILLS = 5


@pytest.mark.long
def test_kills_leave_no_pod_and_do_no_step_twice(
    engine: str, made: Cluster, local_stack: local.LocalStack, namespace: str, tmp_path: Path
) -> None:
    text = Path(RECIPE).read_text()
    hosts = f'hosts = [{{ url = "{engine}", slots = 8 }}], cpus = 0.3'
    assert f'image = "{IMAGE}"' in text
    path = tmp_path / "recipe.toml"
    path.write_text(text.replace(f'image = "{IMAGE}"', f"image = {json.dumps(REFERENCE)}, {hosts}"))
    killing = kill_again_and_again(
        engine, local_stack, namespace, tmp_path, kills=KILLS, path=str(path)
    )
    answered, lost = asyncio.run(asyncio.wait_for(killing, 900))
    print(f"{answered} steps, {lost} attempts lost")
    assert lost < answered
    assert all(pod["metadata"].get("deletionTimestamp") for pod in made.pods())
