"""What lies in `deploy/` speaks of flags, settings, metrics and files that exist, and of ports that fit together."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

from kedge.cli.main import EXIT_BAD_INPUT, app
from kedge.engine.echo import EchoEngine
from kedge.server.metrics import COUNTERS, GAUGES
from kedge.settings import ServerSettings, Settings
from tests.budget import settings
from tests.server.conftest import FLOW, YAML, serving

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILE, PLUGIN = ((DEPLOY / name).read_text(encoding="utf-8") for name in ("Dockerfile", "vllm.Dockerfile"))
UNIT = (DEPLOY / "kedge.service").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXPRESSIONS = [
    (panel["title"], target["expr"])
    for panel in json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    for target in panel["targets"]
]


class CachingEcho(EchoEngine):
    """An engine without a cache that shows the figures of one."""

    def inspect(self) -> dict[str, Any]:
        return {"cache": dict.fromkeys([*COUNTERS, *GAUGES], 1)}


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Name of every series that a server exposes -> its labels. Everything has happened to this server once."""
    with CachingEcho() as engine, serving(engine, ServerSettings(tools=True)) as running, running.http() as http:
        http.post("/v1/workflows", content=FLOW, headers=YAML)
        http.post("/v1/workflows/pair/runs", json={"inputs": {"user_question": "x"}, "stream": True})
        http.post("/v1/completions", json={"prompt": "x", "max_tokens": 5, "ignore_eos": True, "kedge": {"no": 1}})
        http.get("/v1/runs/none")
        running.service.metrics.snapshot("saved")
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


@pytest.mark.parametrize("name", re.findall(r"KEDGE_\w+__\w+", DOCKERFILE))
def test_the_images_variables_are_settings(name: str) -> None:
    assert name in {f"KEDGE_{one.upper().replace('.', '__')}" for one in settings(Settings)}


@pytest.mark.parametrize("name", re.findall(r" (--[a-z-]+)", UNIT.split("ExecStart")[1]))
def test_the_units_flags_exist(name: str) -> None:
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert name in {option for parameter in serve.params for option in parameter.opts}


def instruction(name: str, text: str = DOCKERFILE) -> list[str]:
    """What follows each instruction of this name in a Dockerfile, continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", text)
    return re.findall(rf"^{name} (.*)$", joined, re.MULTILINE)


@pytest.mark.parametrize("text", [DOCKERFILE, PLUGIN], ids=["the server", "vLLM"])
def test_an_image_is_built_from_what_is_there(text: str) -> None:
    copied = {name for line in instruction("COPY", text) if "--from" not in line for name in line.split()[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    told = PROJECT["project"]
    packages = {name.partition("/")[0] for name in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    assert copied >= {"pyproject.toml", told["readme"], *told["license-files"], *packages}, "the build reads these"


def test_the_image_installs_what_the_project_asks_for() -> None:
    (command,) = (line for line in instruction("RUN") if "torch" in line)
    assert re.findall(r'"(torch[^"]*)"', command) == [d for d in PROJECT["project"]["dependencies"] if "torch" in d]
    extras = {name for group in re.findall(r"\[([\w,]+)\]", command + UNIT) for name in group.split(",")}
    assert {"server", "otel"} <= extras & PROJECT["project"]["optional-dependencies"].keys()
    python = re.findall(r"python:3\.(\d+)", DOCKERFILE)
    minors = [int(one.rpartition(".")[2]) for one in PROJECT["project"]["classifiers"] if "Python :: 3." in one]
    assert {int(minor) for minor in python} <= {*minors}


def test_image_and_unit_start_the_server_and_let_it_end() -> None:
    assert [json.loads(line) for line in instruction("ENTRYPOINT")] == [["kedge", "serve"]]
    assert re.search(r"^ExecStart=\S+/kedge serve ", UNIT, re.MULTILINE)
    assert "kedge" in PROJECT["project"]["scripts"]
    assert "serve" in get_command(app).commands  # type: ignore[attr-defined]
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    stop = SERVICES["kedge"]["stop_grace_period"].rstrip("s")
    assert min(int(seconds), int(stop)) > Settings().server.grace
    assert re.findall(r"^RestartPreventExitStatus=(\d+)$", UNIT, re.MULTILINE) == [str(EXIT_BAD_INPUT)]
    assert instruction("STOPSIGNAL") == re.findall(r"^KillSignal=(\w+)$", UNIT, re.MULTILINE) == ["SIGTERM"]


def test_the_images_state_is_its_users_and_in_its_volume() -> None:
    (volume,) = instruction("VOLUME")
    (state,) = re.findall(r"KEDGE_SERVER__STATE=(\S+)", DOCKERFILE)
    assert Path(state).is_relative_to(volume)
    assert any(f"--home-dir {volume} --create-home {user}" in DOCKERFILE for user in instruction("USER"))


def test_the_images_health_check_asks_the_server() -> None:
    assert instruction("EXPOSE") == [str(Settings().server.port)]
    (check,) = instruction("HEALTHCHECK")
    python, *options, code = json.loads(check.partition("CMD ")[2])
    address = f"http://127.0.0.1:{Settings().server.port}"
    assert (python, options, code.count(address)) == ("python", ["-c"], 1)

    def status(url: str) -> int:
        command = [sys.executable, "-c", code.replace(address, url)]
        return subprocess.run(command, check=False, timeout=60, stderr=subprocess.DEVNULL).returncode

    with EchoEngine() as engine, serving(engine) as running:
        assert status(running.url) == 0
        running.service.is_ending = True
        assert status(running.url) != 0


@pytest.mark.parametrize("page", ["docs/guides/operating.md", "docs/server.md"])
def test_the_pages_name_series_that_are_exposed(exposed: dict[str, set[str]], page: str) -> None:
    names = set(re.findall(r"kedge:[a-z_]+", (ROOT / page).read_text(encoding="utf-8")))
    exposed_as = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exposed} | exposed.keys()
    assert names and names <= exposed_as


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_understands_the_unit() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", DEPLOY / "kedge.service"], capture_output=True, text=True, check=False, timeout=60
    )
    complaints = [line for line in done.stderr.splitlines() if "kedge" in line and "is not executable" not in line]
    assert not complaints


COMPOSE = DEPLOY / "compose"


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


SERVICES = load("compose/compose.yaml")["services"]


def mounts(service: str) -> dict[str, str]:
    """What is mounted into a service: its path there -> a path here, or the name of a volume."""
    listed = (one.split(":") for one in SERVICES[service].get("volumes", ()))
    return {there: here for here, there, *_ in listed}


# Compose --------------------------------------------------------------------------------------------------------------


def test_everything_that_is_mounted_or_built_is_there() -> None:
    volumes = load("compose/compose.yaml")["volumes"]
    for name, service in SERVICES.items():
        for here in mounts(name).values():
            assert here in volumes or (COMPOSE / here).is_file(), here
        if build := service.get("build"):
            assert (COMPOSE / build["context"] / build["dockerfile"]).resolve().is_file()


def test_ports_are_published_on_this_machine_alone_and_once() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in published)
    assert len({port.split(":")[1] for port in published}) == len(published)
    assert SERVICES["kedge"]["ports"] == [f"127.0.0.1:{Settings().server.port}:{Settings().server.port}"]


def test_prometheus_reads_the_servers_under_names_that_they_answer_to() -> None:
    jobs = load("compose/prometheus.yaml")["scrape_configs"]
    found = {job["job_name"]: (job["static_configs"][0]["targets"], job["metrics_path"]) for job in jobs}
    assert found == {"kedge": (["kedge:8000"], "/metrics"), "vllm": (["vllm:8000"], "/metrics")}
    assert SERVICES["kedge"]["environment"]["KEDGE_SERVER__ALLOWED_HOSTS"] == "kedge"
    assert mounts("prometheus")["/etc/prometheus/prometheus.yml"] == "./prometheus.yaml"


# vLLM with the plug-in ------------------------------------------------------------------------------------------------


def test_the_image_and_the_values_have_one_version_of_vllm() -> None:
    tags = {model["tag"] for model in load("production-stack.yaml")["servingEngineSpec"]["modelSpec"]}
    assert tags == set(re.findall(r"^ARG VLLM_TAG=(\S+)$", PLUGIN, re.MULTILINE))


@pytest.mark.parametrize("used", ["install_plugin.sh /wheels", 'ENTRYPOINT ["vllm_serve.sh"]'])
def test_scripts_of_the_image_can_be_run(used: str) -> None:
    (script,) = re.findall(r"\w+\.sh", used)
    assert used in PLUGIN and (DEPLOY / script).stat().st_mode & 0o111
    subprocess.run(["bash", "-n", DEPLOY / script], check=True, timeout=20)
