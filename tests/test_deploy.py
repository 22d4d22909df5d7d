"""What lies in `deploy/` speaks of flags, settings and metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

from kedge.cli.main import app
from kedge.config import Settings
from kedge.engine.echo import EchoEngine
from kedge.server.config import ServerConfig
from tests.server.conftest import FLOW, serving

DEPLOY = Path(__file__).parents[1] / "deploy"
EXPRESSIONS = [
    (panel["title"], target["expr"])
    for panel in json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    for target in panel["targets"]
]
FROM_QUERIES = {"le"}


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Name of every series that a server exposes -> its labels. Everything has happened to this server once."""
    with EchoEngine() as engine, serving(engine, ServerConfig(tools=True)) as running, running.http() as http:
        http.post("/v1/workflows", content=FLOW)
        http.post("/v1/workflows/pair/runs", json={"inputs": {"user_question": "x"}, "stream": True})
        http.post("/v1/completions", json={"prompt": "x", "max_tokens": 5, "ignore_eos": True, "kedge": {"no": 1}})
        http.get("/v1/runs/none")
        running.service.metrics.snapshot("saved")
        running.service.agent_runs.board.ignored["stale"] += 1
        families = list(text_string_to_metric_families(http.get("/metrics").text))
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS, ids=[title for title, _ in EXPRESSIONS])
def test_a_panel_asks_for_what_is_exposed(exposed: dict[str, set[str]], title: str, expression: str) -> None:
    names = re.findall(r"kedge:\w+", expression)
    assert names, title
    labels = set(re.findall(r"(\w+)=~?\"", expression))
    for group in re.findall(r"by \(([^)]*)\)", expression):
        labels |= {label.strip() for label in group.split(",")}
    for name in names:
        assert name in exposed
        assert labels <= exposed[name], name


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in json.loads((DEPLOY / "grafana.json").read_text())["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def settings_in(model: Any, prefix: str = "KEDGE_") -> Iterator[str]:
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if hasattr(type(value), "section"):
            yield from settings_in(value, f"{prefix}{name.upper()}__")
        else:
            yield f"{prefix}{field.alias or name}".upper()


@pytest.mark.parametrize("name", re.findall(r"KEDGE_\w+__\w+", (DEPLOY / "Dockerfile").read_text()))
def test_the_images_variables_are_settings(name: str) -> None:
    assert name in set(settings_in(Settings()))


@pytest.mark.parametrize(
    "name", re.findall(r" (--[a-z-]+)", (DEPLOY / "kedge.service").read_text().split("ExecStart")[1])
)
def test_the_units_flags_exist(name: str) -> None:
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert name in {option for parameter in serve.params for option in parameter.opts}


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_understands_the_unit() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", DEPLOY / "kedge.service"], capture_output=True, text=True, check=False, timeout=60
    )
    complaints = [line for line in done.stderr.splitlines() if "kedge" in line and "is not executable" not in line]
    assert not complaints
