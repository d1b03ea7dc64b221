"""Executes the notebook of docs/tutorials on a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorials" / "the-log.ipynb"
LIMIT_S = 120


def execute(folder: Path, bootstrap: str, registry: str, namespace: str) -> list[Any]:
    """Executes all cells in `folder`, with this run instead of the newest local one.

    Returns the code cells with their outputs.
    """
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    (parameters,) = [
        cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())
    ]
    values = {"bootstrap": bootstrap, "registry": registry, "namespace": namespace}
    assert all(name in parameters.source for name in values)
    parameters.source = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    copy = folder / NOTEBOOK.name
    nbformat.write(notebook, copy)  # type: ignore[no-untyped-call]
    private = ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")
    environment = {**os.environ, **{name: str(folder / "jupyter") for name in private}}
    command = [sys.executable, "-m", "jupyter", "execute", "--inplace", str(copy)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    executed = nbformat.read(copy, as_version=4)  # type: ignore[no-untyped-call]
    return [cell for cell in executed.cells if cell.cell_type == "code"]
