"""Checks that an engine keeps the contract of `services/inference/engine.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headrace.services.base.plugins import load
from headrace.services.inference.engine import Engine, EngineSetup
from headrace.services.inference.service import BUILTIN
from headrace.services.operate.conformance.conformance_report import (
    ConformanceReport,
    check_rules,
    chosen,
    rules_of,
)
from headrace.services.operate.conformance.engine.answer_rules import AnswerRules
from headrace.services.operate.conformance.engine.swap_rules import SwapRules
from headrace.services.operate.conformance.engine.trial import EngineTrial
from headrace.services.operate.conformance.engine.trial_model import make_trial_model

SLOTS = 4
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.05}
"""Nats, by dtype."""


def check_engine(
    use: str,
    options: Mapping[str, Any],
    *,
    model: str = "tiny-llama",
    dtype: str = "float32",
    device: str = "auto",
    tolerance: float | None = None,
    frozen: bool = False,
    deterministic: bool = False,
    rules: Collection[str] = (),
    engine: Callable[[EngineSetup], Engine] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> ConformanceReport:
    """Tries an engine with a recipe's `model`. Blocks, for seconds or minutes.

    `rules` names the rules that are tried; empty means all. `engine` makes the engine; without it,
    `use` names its class. Raises UsageError if there is no such class, model or rule.
    """
    make: Callable[[EngineSetup], Engine] = engine or load("engine", use, BUILTIN)
    with TemporaryDirectory(prefix="headrace-conformance-") as scratch:
        say("making two versions of the model, which imports torch")
        tried = make_trial_model(model, Path(scratch), dtype)
        setup = EngineSetup(tried.folder, SLOTS, device=device, dtype=dtype, options=options)
        trial = EngineTrial(
            lambda: make(setup),
            tried,
            SLOTS,
            TOLERANCES[dtype] if tolerance is None else tolerance,
            frozen,
            deterministic,
        )
        wanted = chosen([*rules_of(AnswerRules(trial)), *rules_of(SwapRules(trial))], rules)
        return check_rules("engine", use, wanted, say=say)
