from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.services.operate.gateway_watch import GatewayWatch
from headrace.services.operate.run.live_view import (
    BARS,
    Status,
    make_view,
    panel,
    progress_line,
    sparkline,
)
from headrace.services.operate.run.progress import Progress
from tests.unit.operate.run.test_training_health import SANE
from tests.unit.operate.run.test_training_health import published as of_metrics

RECIPE = parse_recipe(
    {"name": "r", "stop": {"reward": 0.9}, "policies": {"default": {"model": "tiny-llama"}}}, "test"
)


@given(st.lists(st.floats(-5, 5), max_size=200))
def test_a_sparkline_fits_and_has_only_bars(values: list[float]) -> None:
    line = sparkline(values, 10)

    assert len(line) == min(10, len(values))
    assert set(line) <= set(BARS)


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline([0, 0.5, 1]) == "▁▅█"
    assert sparkline([0.0] * 50 + [1.0] * 50, 4) == "▁▁██"


def test_the_plain_view_is_lines_without_control_characters() -> None:
    status, out = Status("r"), io.StringIO()
    view = make_view(status, Console(file=out))
    view.say("starting [kafka]")
    status.phase, status.progress, status.began = "running", Progress(RECIPE), status.began - 10
    view.refresh()
    view.refresh()
    view.close()

    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert "starting [kafka]" in lines[0]
    assert "version -  " in lines[1]
    assert "\x1b" not in out.getvalue()


def test_the_panel_shows_a_run() -> None:
    status = Status("quickstart", progress=Progress(RECIPE), lags={"agent": 1200}, restarts=2)
    out = io.StringIO()
    Console(file=out, width=100).print(panel(status))
    shown = out.getvalue()

    for part in ("quickstart", "of 0.9", "-   batch 0", "agent 1,200", "restarts 2"):
        assert part in shown
    assert progress_line(status).count("\n") == 0


def test_a_run_with_a_gateway_shows_its_clients_once_it_answers() -> None:
    gateway = GatewayWatch("http://here:8100/v1")
    status = Status("r", progress=Progress(RECIPE), gateway=gateway)
    assert "clients" not in shown(status)
    gateway.answered, gateway.clients, gateway.playing, gateway.waiting = True, 9, 3, 21
    for part in ("clients", "3 play", "21 episodes wait", "http://here:8100/v1", "clients 9"):
        assert part in shown(status)


def steered() -> Status:
    """A run of which three versions were published that the engines do not agree with."""
    status = Status("r", progress=Progress(RECIPE))
    assert status.progress is not None
    for version in range(1, 4):
        event = of_metrics(version, SANE | {"engine_gap_p99": 0.7})
        status.progress.on_event(event, 1.0, version)
    return status


def test_the_views_show_the_figures_to_steer_by_and_what_to_do() -> None:
    shown = panelled(steered())
    for part in ("entropy 0.412", "engine gap 0.7", "hint", "disagree about fresh tokens by 0.7"):
        assert part in shown


def test_the_plain_view_says_each_kind_of_hint_once() -> None:
    status, out = steered(), io.StringIO()
    status.phase = "running"
    view = make_view(status, Console(file=out))
    for _ in range(3):
        status.began -= 10
        view.refresh()
    assert (out.getvalue().count("version 3"), out.getvalue().count("hint: ")) == (3, 1)


def panelled(status: Status) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(panel(status))
    return out.getvalue()


def shown(status: Status) -> str:
    return f"{panelled(status)}{progress_line(status)}"
