"""Writes one offline run of W&B: `python -m headrace.services.operate.track.wandb_chunk FOLDER`.

FOLDER has the run's project, id, name and points in a file. It is a process of its own, because W&B
starts another one, and the run is complete only when that has ended.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

REQUEST = "request.json"
"""The file in FOLDER."""


def main() -> None:
    """Writes the run, and returns when W&B's process has ended.

    `resume` says that the run continues the one of the same id, which `wandb sync` looks at.
    """
    import wandb

    folder = Path(sys.argv[1])
    request = json.loads((folder / REQUEST).read_text())
    settings = wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        silent=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    run = wandb.init(
        mode="offline", resume="allow", dir=folder, project=request["project"], id=request["id"],
        name=request["name"], settings=settings,
    )  # fmt: skip
    for point in request["points"]:
        values = {**point["values"], "_timestamp": point["recorded_at"]}
        run.log(values, step=point["version"])
    run.finish()
    wandb.teardown()


if __name__ == "__main__":
    main()
