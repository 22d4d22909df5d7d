"""The adapters to Ray Serve, without a cluster: the router follows the policy, and the ingress retries."""

import asyncio
import importlib
import re
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

pytest.importorskip("ray.serve.llm", reason="Ray Serve LLM is not installed")

from pydantic import ValidationError  # noqa: E402
from ray.exceptions import ActorDiedError  # noqa: E402
from ray.serve._private.common import DeploymentHandleSource, DeploymentID  # noqa: E402
from ray.serve.llm.ingress import OpenAiIngress  # noqa: E402
from ray.serve.request_router import PendingRequest, ReplicaID  # noqa: E402

from kedge.integrations.ray_serve.app import ATTEMPTS, ResendingIngress, ScaleOut  # noqa: E402
from kedge.integrations.ray_serve.router import RunRouter  # noqa: E402

ROOT = Path(__file__).parents[3]
MODEL = DeploymentID("model")


class Replica:
    """The attributes of a replica that Ray Serve's router reads."""

    def __init__(self, name: str) -> None:
        self.replica_id, self.max_ongoing_requests = ReplicaID(name, MODEL), 100

    async def get_queue_len(self, *, deadline_s: float) -> int:  # noqa: ARG002
        return 0


REPLICAS = [Replica(name) for name in ("east", "north", "west")]


def pending(session: str = "", body: Mapping[str, Any] | None = None, **hints: Any) -> PendingRequest:
    asked = SimpleNamespace(kv_transfer_params={"kedge": hints} if hints else None, cache_salt=None, **(body or {}))
    return PendingRequest([asked], {}, SimpleNamespace(session_id=session))  # type: ignore[arg-type]


def with_router(act: Callable[[RunRouter], Any], **settings: Any) -> Any:
    """Return the result of `act` for a router with three idle replicas."""

    async def inside() -> Any:
        router = RunRouter(MODEL, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
        router.initialize_state(**settings)
        router.update_replicas(REPLICAS)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        return await act(router)

    return asyncio.run(inside())


async def send(router: RunRouter, request: PendingRequest) -> str:
    """The replica that is asked first, and takes the request."""
    ranks = await router.choose_replicas(list(router.curr_replicas.values()), request)
    assert all(len(rank) == 1 for rank in ranks) and len(ranks) == len(router.curr_replicas)
    router.on_request_routed(request, ranks[0][0].replica_id, None)
    return ranks[0][0].replica_id.unique_id


@pytest.mark.parametrize("said", [{"run": "r", "agent": "a"}, {"session": "r"}, {"body": {"prompt_cache_key": "r"}}])
def test_a_run_or_a_session_stays_until_its_replica_is_busy_or_dead(said: dict[str, Any]) -> None:
    async def act(router: RunRouter) -> None:
        home = await send(router, pending(**said))
        assert {await send(router, pending(**said)) for _ in range(5)} == {home}
        router.on_new_queue_len_info(ReplicaID(home, MODEL), 3)
        away = await send(router, pending(**said))
        assert away != home
        router.on_replica_actor_died(ReplicaID(away, MODEL))
        assert await send(router, pending(**said)) not in (home, away)

    with_router(act, spill=2)


def test_a_replica_without_a_known_queue_counts_as_idle() -> None:
    async def act(router: RunRouter) -> dict[str, int]:
        for name, length in (("east", 7), ("west", 5)):
            router.on_new_queue_len_info(ReplicaID(name, MODEL), length)
        router.replica_queue_len_cache.invalidate_key(ReplicaID("north", MODEL))
        return router._loads(REPLICAS)  # type: ignore[arg-type]

    assert with_router(act) == {"east": 7, "north": 0, "west": 5}


def test_calls_without_hints_are_left_to_the_queues() -> None:
    async def act(router: RunRouter) -> list[Any]:
        return [await router.choose_replicas(list(REPLICAS), request) for request in (pending(), None)]  # type: ignore[arg-type]

    assert with_router(act) == [[REPLICAS], [REPLICAS]]


def responses(monkeypatch: pytest.MonkeyPatch, tries: list[list[str | Exception]]) -> list[str]:
    """Return the parts from the ingress if Ray Serve's own yields these, attempt after attempt."""

    async def parts(self: Any, **call: Any) -> AsyncIterator[str]:  # noqa: ARG001
        for part in tries.pop(0):
            if isinstance(part, Exception):
                raise part
            yield part

    async def collect() -> list[str]:
        return [part async for part in object.__new__(ResendingIngress)._get_response(body=None, call_method="chat")]

    monkeypatch.setattr(OpenAiIngress, "_get_response", parts)
    return asyncio.run(collect())


def test_a_call_is_retried_before_its_first_part(monkeypatch: pytest.MonkeyPatch) -> None:
    assert responses(monkeypatch, [[ActorDiedError()], [ActorDiedError()], ["a", "b"]]) == ["a", "b"]


@pytest.mark.parametrize(
    ("tries", "error"),
    [
        ([["a", ActorDiedError()], ["never asked"]], ActorDiedError),
        ([[ActorDiedError()]] * ATTEMPTS + [["never asked"]], ActorDiedError),
        ([[ValueError("no such model")], ["never asked"]], ValueError),
    ],
)
def test_a_call_that_began_or_failed_too_often_or_otherwise_is_not_retried(
    monkeypatch: pytest.MonkeyPatch, tries: list[Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        responses(monkeypatch, tries)
    assert tries == [["never asked"]]


def test_the_application_is_ray_serves_own_with_three_parts_replaced() -> None:
    given = ScaleOut(model="m", device="cpu", engine={"tensor_parallel_size": 2}, plugin={"reuse": "exact"}, spill=9)
    args = given.serving_args()
    (config,) = args["llm_configs"]
    assert args["ingress_cls_config"] == {"ingress_cls": ResendingIngress}
    assert config["engine_kwargs"]["tensor_parallel_size"] == 2
    assert config["engine_kwargs"]["kv_transfer_config"]["kv_connector_extra_config"] == {"reuse": "exact"}
    router = config["deployment_config"]["request_router_config"]
    assert router == {"request_router_class": RunRouter, "request_router_kwargs": {"spill": 9}}
    assert config["deployment_config"]["num_replicas"] == 2


def test_autoscaling_takes_the_place_of_a_number() -> None:
    scaled = ScaleOut(model="m", deployment={"autoscaling_config": {"max_replicas": 4}}).serving_args()
    assert "num_replicas" not in scaled["llm_configs"][0]["deployment_config"]


@pytest.mark.parametrize("bad", [{"replica": 2}, {"replicas": 0}, {"spill": -1}, {"device": "tpu"}])
def test_unknown_settings_and_bad_values_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ScaleOut(model="m", **bad)


def test_the_configuration_for_gpus_is_understood() -> None:
    (application,) = yaml.safe_load((ROOT / "deploy" / "ray_serve.yaml").read_text(encoding="utf-8"))["applications"]
    module, function = application["import_path"].split(":")
    assert callable(getattr(importlib.import_module(module), function))
    (config,) = ScaleOut(**application["args"]).serving_args()["llm_configs"]
    assert config["engine_kwargs"]["tensor_parallel_size"] == 2


def test_the_guide_lists_all_settings() -> None:
    guide = (ROOT / "docs" / "guides" / "scale-out.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.*?) \|", guide, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == set(ScaleOut.model_fields)
