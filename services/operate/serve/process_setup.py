"""Sets up the process of a service: logging, numerical libraries, open files, garbage collector."""

from __future__ import annotations

import gc
import logging
import os
import resource
import sys
import time
from contextlib import suppress

from headrace.schemas.recipe.recipe import Recipe
from headrace.services.operate.serve.repeats import Repeats

GC_THRESHOLD = 10_000
"""Allocations between two garbage collections. Live episodes are many small objects that are not
garbage, and with Python's default of 700 the collector would visit them several times a second."""
THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS",
)  # fmt: skip
COMPUTING = ("inference", "trainer")
"""Services whose threads feed GPUs, and should run as soon as they can."""
MOST_FILES = 65_536
"""A service may have so many open files, if the system allows it."""
LOUD_LOGGERS = ("aiokafka", "faust", "httpx", "httpx2", "mode", "urllib3", "vllm")
"""Libraries of which only warnings are logged."""


def configure_logging(service: str, *, debug: bool = False) -> None:
    """Logs each message to stderr as one line: UTC time, level, service, message.

    A traceback that comes again is not repeated.
    """
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {service} %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    handler.addFilter(Repeats())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if debug else logging.INFO)
    for name in LOUD_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def set_up_process(recipe: Recipe, service: str, policy: str | None) -> None:
    """Sets the limits and the scheduling of a service's process, before it starts threads."""
    allow_files()
    limit_threads(recipe, service, policy)
    if service not in COMPUTING:
        schedule_as_batch()


def limit_threads(recipe: Recipe, service: str, policy: str | None) -> None:
    """Limits the threads of numerical libraries to what the recipe says.

    The libraries read the limit once, when they are imported.
    """
    policies = [one for name, one in recipe.policies.items() if policy in (None, name)]
    threads = 1
    if service == "inference":
        threads = max(one.engine.threads for one in policies)
    elif service == "trainer":
        threads = max((o.training.threads for o in policies if o.training is not None), default=1)
    for variable in THREAD_VARIABLES:
        os.environ.setdefault(variable, str(threads))


def allow_files() -> None:
    """Raises the limit of open files, which is 1,024 in most shells and for most services.

    Each environment at a server has a connection, and each client of the gateway.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):  # macOS has yet another limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def schedule_as_batch() -> None:
    """Keeps threads of this process from interrupting others when they wake up (SCHED_BATCH).

    They wait for the end of the other's slice, a few milliseconds, if no processor is idle. So on a
    busy machine a thread finds more records when it runs, and there are fewer switches. Threads and
    processes that are started later inherit this. Where Linux's policies don't exist, nothing
    happens.
    """
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pause_garbage_collector() -> None:
    """Keeps the collector from running while modules are imported.

    Imports make many objects and little garbage. It would take a seventh of torch's import.
    """
    gc.disable()


def tune_garbage_collector() -> None:
    """Freezes imported objects so that the collector skips them, and makes it run less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    gc.enable()


def end_garbage_collection() -> None:
    """Lets the collector skip all that there is now. The process is about to end.

    Otherwise it visits everything once more when the interpreter ends, which takes seconds with
    100,000 live episodes.
    """
    gc.disable()
    gc.freeze()
