"""Records the start-up archives of Kafka and the registry, once for a machine.

python -m headrace.infra.local.archives

It starts both servers once, on free ports and with no data, and ends them: then they write their
archives. `make install` does this. No command of `headrace` does, because it would have to wait for
it or leave a process behind. If the recorder is killed, the guard of its servers ends them, and the
next start finds no archive and works without one.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.infra.local import detached as processes
from headrace.infra.local import jars
from headrace.infra.local import java_runtime as runtime
from headrace.infra.local.detached import Cancelled
from headrace.infra.local.stack import down, up
from headrace.infra.local.start import KINDS
from headrace.services.base.files import private_folder

_SCRATCH = "recorded-"


def missing() -> bool:
    """Returns whether a server has no archive yet. Raises UsageError without the extra `local`."""
    pins, cache, java = jars.load_pins(), jars.cache_folder(), jars.java()
    return not all(
        runtime.prepare(
            name, java, kind.class_path(pins, cache), kind.heap, cache, may_record=False
        ).archive.exists()
        for name, kind in KINDS.items()
    )


def record() -> bool:
    """Records the archives that are missing. Returns False if another process does that now.

    Raises DependencyError if a server can't be fetched, started or ended.
    """
    folder = runtime.archives_folder(jars.cache_folder())
    private_folder(folder)
    try:
        with processes.locked(folder / "recording.lock", 0.0, cancelled=lambda: True):
            for left in folder.glob(f"{_SCRATCH}*"):
                _remove(left)  # of a recorder that was killed
            if missing():
                scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=folder))
                try:
                    up(
                        scratch, kafka_port=0, registry_port=0, owner_pid=os.getpid(),
                        record_archives=True,
                    )  # fmt: skip
                finally:
                    _remove(scratch)
    except Cancelled:
        return False
    return True


def _remove(scratch: Path) -> None:
    """Ends the servers of a scratch folder, and deletes it."""
    try:
        down(scratch, wipe=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> None:
    """Records, and says why if that fails: nothing depends on it."""
    try:
        record()
    except (HeadraceError, OSError) as error:
        print(f"no Java start-up archives were recorded, so starts are slower: {error}")
    except KeyboardInterrupt:  # make says that it was interrupted
        raise SystemExit(128 + signal.SIGINT) from None


if __name__ == "__main__":
    main()
