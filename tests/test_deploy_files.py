"""The Compose file and the values for vLLM's production stack: keys that exist, ports and names that fit together."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kedge.settings import Settings

DEPLOY = Path(__file__).parents[1] / "deploy"
COMPOSE = DEPLOY / "compose"


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


SERVICES = load("compose/compose.yaml")["services"]
VALUES = load("production-stack.yaml")


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


def test_the_host_that_prometheus_names_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_SERVER__ALLOWED_HOSTS", SERVICES["kedge"]["environment"]["KEDGE_SERVER__ALLOWED_HOSTS"])
    assert Settings().server.allowed_hosts == ("kedge",)


def test_the_grace_of_running_answers_fits_into_the_stop() -> None:
    assert int(SERVICES["kedge"]["stop_grace_period"].rstrip("s")) > Settings().server.grace


def test_grafana_has_the_dashboard_and_its_source() -> None:
    (source,) = load("compose/grafana/datasources.yaml")["datasources"]
    assert source["type"] == "prometheus" and source["isDefault"]
    assert source["url"] == "http://prometheus:9090" and SERVICES["prometheus"]["ports"] == ["127.0.0.1:9090:9090"]
    (provider,) = load("compose/grafana/dashboards.yaml")["providers"]
    (place,) = (there for there, here in mounts("grafana").items() if here == "../grafana.json")
    assert Path(place).parent == Path(provider["options"]["path"])
    variables = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))["templating"]["list"]
    assert any(one["type"] == "datasource" and one["query"] == source["type"] for one in variables)
    assert {"datasources", "dashboards"} <= {Path(there).parent.name for there in mounts("grafana")}


@pytest.mark.skipif(
    not shutil.which("docker") or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode != 0,
    reason="docker compose is not installed",
)
def test_compose_understands_the_file() -> None:
    command = ["docker", "compose", "-f", str(COMPOSE / "compose.yaml"), "--profile", "vllm", "config", "--quiet"]
    subprocess.run(command, check=True, timeout=60)


# Production stack -----------------------------------------------------------------------------------------------------

CHART = {
    "name": str, "repository": str, "tag": str, "modelURL": str, "replicaCount": int, "requestCPU": int,
    "requestMemory": str, "requestGPU": int, "pvcStorage": str, "vllmConfig": dict,
}  # fmt: skip
"""The keys of a model that the values use, as `helm/values.schema.json` of the chart has them"""


def test_the_values_are_those_of_the_chart() -> None:
    assert VALUES.keys() == {"servingEngineSpec", "routerSpec"}
    engine, router = VALUES["servingEngineSpec"], VALUES["routerSpec"]
    assert engine.keys() == {"enableEngine", "runtimeClassName", "modelSpec"}
    for model in engine["modelSpec"]:
        assert {key: type(value) for key, value in model.items()} == CHART
        config = model["vllmConfig"]
        assert {key: type(value) for key, value in config.items()} == {
            "enablePrefixCaching": bool, "maxModelLen": int, "extraArgs": list,
        }  # fmt: skip
        assert config["enablePrefixCaching"], "the chart passes --no-enable-prefix-caching otherwise"
        assert all(isinstance(one, str) for one in config["extraArgs"])
    assert {key: type(value) for key, value in router.items()} == {
        "enableRouter": bool, "replicaCount": int, "routingLogic": str, "sessionKey": str,
    }  # fmt: skip
    assert router["routingLogic"] in {"roundrobin", "session", "prefixaware", "kvaware"}


def test_the_image_and_the_values_have_one_version_of_vllm() -> None:
    image = (DEPLOY / "vllm.Dockerfile").read_text(encoding="utf-8")
    assert {model["tag"] for model in VALUES["servingEngineSpec"]["modelSpec"]} == set(
        re.findall(r"^ARG VLLM_TAG=(\S+)$", image, re.MULTILINE)
    )


# the image with the plug-in -------------------------------------------------------------------------------------------


def test_the_image_copies_what_is_there_and_uses_it() -> None:
    image = (DEPLOY / "vllm.Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (?!--from)(.*)$", image, re.MULTILINE):
        assert all((DEPLOY.parent / name).exists() for name in line.split()[:-1]), line
    assert "install_plugin.sh /wheels" in image and 'ENTRYPOINT ["vllm_serve.sh"]' in image


@pytest.mark.parametrize("script", ["install_plugin.sh", "vllm_serve.sh"])
def test_scripts_can_be_run(script: str) -> None:
    assert (DEPLOY / script).stat().st_mode & 0o111
    subprocess.run(["bash", "-n", DEPLOY / script], check=True, timeout=20)
